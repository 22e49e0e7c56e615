"""Drives a decoder the way a worker does: ragged steps over block tables, here one position's logits after another."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, Backend
from kernels.formats import PLACES_PER_SLAB, Format, entry
from worker_svc.models.decoder import Decoder

CPU = torch.device("cpu")


@dataclass(slots=True)
class Row:
    """A sequence in the run: its tokens, its blocks, and the logits of every position computed so far."""

    token_ids: list[int]
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


class PagedRun:
    """An arena with its blocks handed out in random order, and the rows that live in it."""

    def __init__(self, decoder: Decoder, backend: Backend, block_size: int, num_slabs: int = 12) -> None:
        self.decoder, self.backend, self.block_size = decoder, backend, block_size
        self.layout = decoder.layout(block_size, slab_blocks=4)
        shape = (decoder.config.num_layers, num_slabs, self.layout.slab_bytes)
        self.arena = torch.zeros(shape, dtype=torch.uint8)
        self.free = [slab * PLACES_PER_SLAB + place for slab in range(num_slabs) for place in range(4)]
        random.Random(1).shuffle(self.free)
        backend.warm_up(self.layout, decoder.config.num_heads, decoder.attention_params)

    def add(self, token_ids: list[int], prefix_of: Row | None = None, num_cached: int = 0) -> Row:
        """Return a new row whose first `num_cached` tokens (whole blocks) lie in another row's blocks already."""
        assert num_cached % self.block_size == 0
        shared = prefix_of.block_ids[: num_cached // self.block_size] if prefix_of else []
        return Row(token_ids, num_computed=num_cached, block_ids=list(shared))

    def step(self, scheduled: list[tuple[Row, int]]) -> None:
        """Run one forward over the next tokens of each row, (row, tokens), and keep all their logits."""
        logits = iter(self.decoder.compute_logits(self.forward(scheduled)))
        for row, num_tokens in scheduled:
            for _ in range(num_tokens):
                row.logits[row.num_computed] = next(logits)
                row.num_computed += 1

    def forward(self, scheduled: list[tuple[Row, int]], wanted: Tensor | None = None) -> Tensor:
        """Return the hidden states of the next tokens of each row, which do not count as computed yet."""
        token_ids, positions, slots, cu_seqlens = [], [], [], [0]
        for row, num_tokens in scheduled:
            end = row.num_computed + num_tokens
            while len(row.block_ids) * self.block_size < end:
                row.block_ids.append(self.free.pop())
            for position in range(row.num_computed, end):
                block_idx, offset = divmod(position, self.block_size)
                slots.append(row.block_ids[block_idx] * self.block_size + offset)
                token_ids.append(row.token_ids[position])
                positions.append(position)
            cu_seqlens.append(len(token_ids))
        return self.decoder.forward(
            torch.tensor(token_ids),
            torch.tensor(positions),
            self.arena,
            self._batch(scheduled, cu_seqlens),
            torch.tensor(slots),
            self.backend,
            self.layout,
            wanted,
        )

    def _batch(self, scheduled: list[tuple[Row, int]], cu_seqlens: list[int]) -> AttentionBatch:
        width = max(len(row.block_ids) for row, _ in scheduled)
        table = torch.full((len(scheduled), width), entry(0, Format.NATIVE), dtype=torch.int32)
        for row_idx, (row, _) in enumerate(scheduled):
            entries = [entry(block_id, Format.NATIVE) for block_id in row.block_ids]
            table[row_idx, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        return AttentionBatch(
            block_table=table,
            context_lens=torch.tensor([row.num_computed + count for row, count in scheduled], dtype=torch.int32),
            cu_seqlens_q=torch.tensor(cu_seqlens, dtype=torch.int32),
            max_query_len=max(count for _, count in scheduled),
        )
