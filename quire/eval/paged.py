"""Sequences under precision policies, stepped as scheduler and worker do it, in one process.

A step takes the next tokens of some rows, none past the end of the block that it begins in. Before its forward each
row's full blocks are written anew in the formats that the policy wants at their age, as a scheduler plans it: straight
to the format that is due, from the one copy that there is. So a query reads its keys in the very formats in which a
decode at the same position would.

    forward of tokens 32 .. 47 under native:1,int8

    block            0          1          2
    full             yes        yes        written by this step
    format           native     native     native          first block, newest full block, tail
                     --- then, before 48 .. 63: block 1 becomes int8, block 2 is the newest full one
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, block_of, entry, format_of
from quire.eval.loading import LoadedModel
from scheduler_svc.core.precision import PrecisionPolicy

_FIRST_SLABS = 32


class BlockStore:
    """An arena that grows, and who references which block in it. A slab, once given to a format, stays with it."""

    def __init__(self, num_layers: int, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        self.arena = torch.zeros(num_layers, _FIRST_SLABS, layout.slab_bytes, dtype=torch.uint8, device=device)
        self._free: dict[Format, list[int]] = defaultdict(list)
        self._num_used_slabs = 0
        self._num_references: dict[int, int] = {}

    @property
    def num_used_blocks(self) -> int:
        """Blocks that rows reference."""
        return len(self._num_references)

    def take(self, fmt: Format) -> int:
        """Return the entry of a block that nobody else has."""
        if not self._free[fmt]:
            self._free[fmt] = self._open_slab(fmt)
        taken = self._free[fmt].pop()
        self._num_references[taken] = 1
        return taken

    def share(self, taken: int) -> int:
        """Return the entry of a block that one row more references."""
        self._num_references[taken] += 1
        return taken

    def give_back(self, taken: int) -> None:
        """Drop one reference to a block."""
        self._num_references[taken] -= 1
        if self._num_references[taken] == 0:
            del self._num_references[taken]
            self._free[format_of(taken)].append(taken)

    def _open_slab(self, fmt: Format) -> list[int]:
        if self._num_used_slabs == self.arena.shape[1]:
            self.arena = torch.cat((self.arena, torch.zeros_like(self.arena)), dim=1)
        first_block_id = self._num_used_slabs * PLACES_PER_SLAB
        self._num_used_slabs += 1
        places = self.layout.blocks_per_slab(fmt)
        return [entry(first_block_id + place, fmt) for place in reversed(range(places))]


@dataclass(slots=True, eq=False)
class Row:
    """A sequence: its policy and where its blocks lie."""

    policy: PrecisionPolicy
    entries: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_aged_blocks: int = 0  # full blocks when the policy was last looked at

    @property
    def formats(self) -> list[Format]:
        """The format of each block."""
        return [format_of(taken) for taken in self.entries]


class PagedRows:
    """The rows of a task, the arena that they share, and the model that steps them."""

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        self.block_size = block_size
        self._decoder, self._backend = model.decoder, model.backend
        self._layout = model.decoder.layout(block_size)
        self._device = model.decoder.device
        self.store = BlockStore(model.config.num_layers, self._layout, self._device)

    def warm_up(self) -> None:
        """Compile, or load, all kernels, so that no step's time has that in it."""
        config = self._decoder.config
        self._backend.warm_up(self._layout, config.num_heads, self._decoder.attention_params, tuple(Format))

    def start(self, policy: PrecisionPolicy) -> Row:
        """Return a row without tokens."""
        return Row(policy)

    def fork(self, row: Row) -> Row:
        """Return a row with the same past: full blocks are shared, a block that is not full is copied."""
        num_full = row.num_computed_tokens // self.block_size
        entries = [self.store.share(taken) for taken in row.entries[:num_full]]
        for tail in row.entries[num_full:]:
            copied = self.store.take(Format.NATIVE)
            self._backend.copy_blocks(self.store.arena, self._int32([tail]), self._int32([copied]), self._layout)
            entries.append(copied)
        return Row(row.policy, entries, row.num_computed_tokens, row.num_aged_blocks)

    def release(self, rows: Sequence[Row]) -> None:
        """Drop rows; their blocks are free."""
        for row in rows:
            for taken in row.entries:
                self.store.give_back(taken)
            row.entries = []

    def run(self, feeds: Sequence[tuple[Row, Sequence[int]]]) -> Iterator[list[Tensor]]:
        """Step rows, each with tokens of its own, in chunks that end at block borders, until all are computed.

        Yields after each step the hidden states [tokens of the step, H] of each feed, none where it had ended before.
        """
        begins = [0] * len(feeds)
        while True:
            chunks = [
                tokens[begin : begin + self.block_size - row.num_computed_tokens % self.block_size]
                for (row, tokens), begin in zip(feeds, begins, strict=True)
            ]
            scheduled = [(row, chunk) for (row, _), chunk in zip(feeds, chunks, strict=True) if chunk]
            if not scheduled:
                return
            hidden = self.step(scheduled)
            yield list(torch.split_with_sizes(hidden, [len(chunk) for chunk in chunks]))
            begins = [begin + len(chunk) for begin, chunk in zip(begins, chunks, strict=True)]

    def step(self, scheduled: Sequence[tuple[Row, Sequence[int]]]) -> Tensor:
        """Narrow what has come of age, then compute the next tokens of rows; return their hidden states [T, H].

        No row's tokens may reach past the block that they begin in.
        """
        self._narrow([row for row, _ in scheduled])
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_seqlens_q = [0]
        for row, tokens in scheduled:
            block_idx, offset = divmod(row.num_computed_tokens, self.block_size)
            assert 0 < len(tokens) <= self.block_size - offset, "a step ends at a block border"
            if block_idx == len(row.entries):
                row.entries.append(self.store.take(Format.NATIVE))
            assert format_of(row.entries[block_idx]) is Format.NATIVE, "only native blocks are written"
            first_slot = block_of(row.entries[block_idx]) * self.block_size + offset
            token_ids += tokens
            positions += range(row.num_computed_tokens, row.num_computed_tokens + len(tokens))
            slots += range(first_slot, first_slot + len(tokens))
            cu_seqlens_q.append(len(token_ids))
            row.num_computed_tokens += len(tokens)
        return self._decoder.forward(
            torch.tensor(token_ids, device=self._device),
            torch.tensor(positions, device=self._device),
            self.store.arena,
            self._batch([row for row, _ in scheduled], cu_seqlens_q, max(len(tokens) for _, tokens in scheduled)),
            torch.tensor(slots, device=self._device),
            self._backend,
            self._layout,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 [R, vocab], of hidden states [R, H]."""
        return self._decoder.compute_logits(hidden)

    def _narrow(self, rows: Sequence[Row]) -> None:
        """Write full blocks anew in the formats that the policies want at their age."""
        sources, targets = [], []
        for row in rows:
            num_full = row.num_computed_tokens // self.block_size
            if num_full == row.num_aged_blocks:
                continue
            row.num_aged_blocks = num_full
            for block_idx in range(num_full):
                wanted = Format(row.policy.format_of(block_idx, num_full))
                if wanted > format_of(row.entries[block_idx]):
                    sources.append(row.entries[block_idx])
                    row.entries[block_idx] = self.store.take(wanted)
                    targets.append(row.entries[block_idx])
        if sources:
            self._backend.requantize_blocks(self.store.arena, self._int32(sources), self._int32(targets), self._layout)
        # Only now: no place that an operation reads may be one that it writes.
        for source in sources:
            self.store.give_back(source)

    def _batch(self, rows: Sequence[Row], cu_seqlens_q: Sequence[int], max_query_len: int) -> AttentionBatch:
        width = max(len(row.entries) for row in rows)
        return AttentionBatch(
            block_table=self._int32([[*row.entries, *[0] * (width - len(row.entries))] for row in rows]),
            context_lens=self._int32([row.num_computed_tokens for row in rows]),
            cu_seqlens_q=self._int32(cu_seqlens_q),
            max_query_len=max_query_len,
        )

    def _int32(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
