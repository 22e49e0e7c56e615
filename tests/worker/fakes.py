"""A model without weights, and builders of the messages that the worker takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.formats import Format, KVLayout, entry
from protos import common_pb2
from protos import worker_pb2 as pb
from worker_svc.arena_plan import ArenaPlan
from worker_svc.batch import StepBatch
from worker_svc.entries import EntryBounds
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.sampler import Sampler
from worker_svc.step import StepRunner

BLOCK_SIZE = 8
VOCAB_SIZE = 97
EOS = 1
LAYOUT = KVLayout(num_kv_heads=1, head_size=8, block_size=BLOCK_SIZE, native_dtype="float32", slab_blocks=4)
PLAN = ArenaPlan(num_layers=1, num_slabs=8, layout=LAYOUT)
PLACES_PER_SLAB = 256


def entry_of(block_idx: int) -> int:
    """Return the entry of the arena's `block_idx`-th native block."""
    slab_idx, place = divmod(block_idx, LAYOUT.slab_blocks)
    return entry(slab_idx * PLACES_PER_SLAB + place, Format.NATIVE)


def entries_of(*block_idxs: int) -> list[int]:
    return [entry_of(idx) for idx in block_idxs]


def next_token(token_ids: Sequence[int]) -> int:
    """Return what the fake model says after these tokens: it depends on each of them and on their order."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % 1_000_003
    return state % VOCAB_SIZE


def greedy_continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class FakeCompute:
    """Keeps each token where its KV would be, and reads them back through block tables, as attention would."""

    slots: dict[int, int] = field(default_factory=dict)
    fail_next: BaseException | None = None
    poisoned_token: int | None = None  # a context that ends in it has logits that are not finite
    num_forwards: int = 0
    num_waits: int = 0

    def forward(self, batch: StepBatch) -> Tensor:
        self.num_forwards += 1
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self.slots.update(zip(batch.slot_mapping.tolist(), batch.token_ids.tolist(), strict=True))
        logits = torch.zeros(len(batch.sampling_token_idxs), VOCAB_SIZE)
        rows = np.searchsorted(batch.cu_seqlens_q, batch.sampling_token_idxs, side="right") - 1
        for idx, row in enumerate(rows):
            context = [self._read(batch.block_table[row], position) for position in range(batch.context_lens[row])]
            logits[idx, next_token(context)] = float("nan") if context[-1] == self.poisoned_token else 8.0
        return logits

    def wait(self) -> None:
        self.num_waits += 1

    def _read(self, table: "np.ndarray[tuple[int], np.dtype[np.int32]]", position: int) -> int:
        block_id = int(table[position // BLOCK_SIZE]) >> 3
        return self.slots[block_id * BLOCK_SIZE + position % BLOCK_SIZE]

    def zero_blocks(self, entries: Sequence[int]) -> None:
        for zeroed in entries:
            for offset in range(BLOCK_SIZE):
                self.slots[(zeroed >> 3) * BLOCK_SIZE + offset] = 0

    def requantize_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        self.copy_blocks(src_entries, dst_entries)  # what a format keeps is no concern of a step's

    def copy_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        for src, dst in zip(src_entries, dst_entries, strict=True):
            for offset in range(BLOCK_SIZE):
                if (src >> 3) * BLOCK_SIZE + offset in self.slots:
                    self.slots[(dst >> 3) * BLOCK_SIZE + offset] = self.slots[(src >> 3) * BLOCK_SIZE + offset]


def make_limits(max_num_seqs: int = 4, max_model_len: int = 64) -> MirrorLimits:
    return MirrorLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        entries=EntryBounds(PLAN.num_slabs, PLAN.places_per_slab),
        eos_token_ids=(EOS,),
    )


def make_mirror(max_num_seqs: int = 4, max_model_len: int = 64) -> Mirror:
    return Mirror(make_limits(max_num_seqs, max_model_len))


def make_runner(compute: FakeCompute | None = None) -> StepRunner:
    return StepRunner(make_mirror(), compute or FakeCompute(), Sampler(VOCAB_SIZE))


def sampling_params(**changes: object) -> common_pb2.SamplingParams:
    """Return parameters that change nothing (greedy), with `changes`."""
    values: dict[str, object] = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 100} | changes
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


def new_row(
    seq_id: int,
    token_ids: Sequence[int],
    entries: Sequence[int],
    *,
    num_computed: int = 0,
    num_scheduled: int | None = None,
    seq_epoch: int = 0,
    num_prompt_tokens: int | None = None,
    sampling: common_pb2.SamplingParams | None = None,
) -> pb.NewRow:
    return pb.NewRow(
        seq_id=seq_id,
        seq_epoch=seq_epoch,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        entries=entries,
        num_computed_tokens=num_computed,
        num_scheduled_tokens=len(token_ids) - num_computed if num_scheduled is None else num_scheduled,
        sampling=sampling or sampling_params(),
    )


def continued(*seq_ids: int) -> pb.ContinuedRows:
    """Return rows that decode one token each without a new block."""
    return pb.ContinuedRows(seq_ids=seq_ids)


def seals(*pairs: tuple[int, bytes]) -> pb.Seals:
    return pb.Seals(
        entries=[sealed for sealed, _ in pairs],
        block_hashes=b"".join(block_hash for _, block_hash in pairs),
        recipe_versions=[0],
    )


def tokens_of(result: pb.StepResult) -> dict[int, int]:
    """Return the token that each row sampled."""
    return dict(zip(result.sampled.seq_ids, result.sampled.token_ids, strict=True))
