"""Ragged batches on scattered blocks, and their attention by any backend."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, AttentionParams, Backend
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, block_of, entry

Row = tuple[int, int]  # context length, query length

# Both backends keep KV in the same dtype and compute in float32: what differs is the order of sums, and where that
# decides how an output is rounded, one unit in the last place of the output's dtype.
OUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}

MIXED_ROWS: Sequence[Row] = ((1, 1), (700, 1), (333, 40), (65, 64), (17, 17), (300, 2), (64, 1), (129, 3))


def entries(*block_ids: int) -> Tensor:
    """Return the entries of native blocks."""
    return torch.tensor([entry(block_id, Format.NATIVE) for block_id in block_ids], dtype=torch.int32)


def noise_arena(layout: KVLayout, num_layers: int = 3, num_slabs: int = 3) -> Tensor:
    """Return an arena of random bytes."""
    return torch.randint(0, 256, (num_layers, num_slabs, layout.slab_bytes), dtype=torch.uint8)


def blocks_of(arena: Tensor, layout: KVLayout) -> Tensor:
    """Return a view [num_layers, num_slabs, slab_blocks, block_bytes] of native blocks."""
    return arena.view(*arena.shape[:2], layout.slab_blocks, -1)


@dataclass(frozen=True)
class Case:
    """A batch with all keys and values of its rows, of which the last query_len tokens are queries."""

    layout: KVLayout
    num_slabs: int
    rows: Sequence[Row]
    block_table: Tensor
    slots: Tensor
    key: Tensor
    value: Tensor
    query: Tensor  # of every token of every row, in order

    def batch(self, rows: Sequence[Row] | None = None) -> AttentionBatch:
        """Return the batch, with other context and query lengths where they are given."""
        rows = self.rows if rows is None else rows
        query_lens = [query_len for _, query_len in rows]
        return AttentionBatch(
            block_table=self.block_table,
            context_lens=torch.tensor([context_len for context_len, _ in rows], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
            max_query_len=max(query_lens),
        )

    def queries(self, rows: Sequence[Row] | None = None) -> Tensor:
        """Return the queries of `batch(rows)`."""
        begins = itertools.accumulate((context_len for context_len, _ in self.rows), initial=0)
        rows = self.rows if rows is None else rows
        parts = [self.query[b + n - q : b + n] for b, (n, q) in zip(begins, rows, strict=False)]
        return torch.cat(parts)

    def only_row(self, row: int) -> "Case":
        """Return the case of one row alone, on the same blocks."""
        begins = [0, *itertools.accumulate(context_len for context_len, _ in self.rows)]
        tokens = slice(begins[row], begins[row + 1])
        return replace(
            self, rows=[self.rows[row]], block_table=self.block_table[row : row + 1].clone(), slots=self.slots[tokens],
            key=self.key[tokens], value=self.value[tokens], query=self.query[tokens],
        )  # fmt: skip


def make_case(
    rows: Sequence[Row] = MIXED_ROWS,
    *,
    num_kv_heads: int = 2,
    group: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    native_dtype: str = "bfloat16",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Make a case of random numbers whose blocks lie scattered over slabs of 5; `dtype` is the activations'."""
    random = torch.Generator().manual_seed(seed)
    layout = KVLayout(num_kv_heads, head_size, block_size, native_dtype, slab_blocks=5)
    counts = [-(-context_len // block_size) for context_len, _ in rows]
    num_slabs = sum(counts) // layout.slab_blocks + 2
    places = torch.randperm(num_slabs * layout.slab_blocks, generator=random).tolist()
    table = torch.full((len(rows), max(counts) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        for b in range(count):
            slab_idx, place = divmod(places.pop(), layout.slab_blocks)
            table[row, b] = entry(slab_idx * PLACES_PER_SLAB + place, Format.NATIVE)
    slots = [
        block_of(int(table[row, token // block_size])) * block_size + token % block_size
        for row, (context_len, _) in enumerate(rows)
        for token in range(context_len)
    ]
    tokens = len(slots)

    def noise(num_heads: int) -> Tensor:
        return torch.randn(tokens, num_heads, head_size, generator=random).to(dtype)

    key, value, query = noise(num_kv_heads), noise(num_kv_heads), noise(num_kv_heads * group)
    return Case(layout, num_slabs, rows, table, torch.tensor(slots, dtype=torch.int64), key, value, query)


def plain_params(case: Case) -> AttentionParams:
    """Return the usual scale, and neither window nor cap."""
    return AttentionParams(scale=case.layout.head_size**-0.5)


def filled_arena(backend: Backend, case: Case) -> Tensor:
    """Return one layer's arena with the case's KV written; every other byte is part of a NaN."""
    arena = torch.full((case.num_slabs, case.layout.slab_bytes), 0xFF, dtype=torch.uint8)
    backend.write_kv(arena, case.key, case.value, case.slots, case.layout)
    return arena


def demoted(
    backend: Backend, case: Case, choose: Callable[[int, int], Format], arena: Tensor | None = None
) -> tuple[Case, Tensor]:
    """Return the case, and one layer's arena, with full blocks brought to the format chosen for (row, block)."""
    layout, arena = case.layout, filled_arena(backend, case) if arena is None else arena
    moves: dict[Format, list[tuple[int, int]]] = {}
    for row, (context_len, _) in enumerate(case.rows):
        for b in range(context_len // layout.block_size):
            if (fmt := choose(row, b)) is not Format.NATIVE:
                moves.setdefault(fmt, []).append((row, b))
    table, slab_idx = case.block_table.clone(), case.num_slabs
    for fmt, blocks in moves.items():
        capacity = layout.blocks_per_slab(fmt)
        for i, (row, b) in enumerate(blocks):
            block_id = (slab_idx + i // capacity) * PLACES_PER_SLAB + capacity - 1 - i % capacity
            table[row, b] = entry(block_id, fmt)
        slab_idx += -(-len(blocks) // capacity)
    larger = torch.full((slab_idx, layout.slab_bytes), 0xFF, dtype=torch.uint8)
    larger[: case.num_slabs] = arena[: case.num_slabs]
    changed = table != case.block_table
    backend.requantize_blocks(larger.unsqueeze(0), case.block_table[changed], table[changed], layout)
    return replace(case, block_table=table, num_slabs=slab_idx), larger


def by_age(row: int, block: int) -> Format:
    """Choose formats in runs of three blocks, the narrowest first after a native one, as policies leave them."""
    return (Format.NATIVE, Format.INT4, Format.K8V4, Format.FP8, Format.INT8)[-(-block // 3) % 5]


def in_disorder(row: int, block: int) -> Format:
    """Choose formats without order."""
    return Format((7 * row + 5 * block * block + block) % 11 % 5)


def attention(
    backend: Backend,
    case: Case,
    params: AttentionParams | None = None,
    rows: Sequence[Row] | None = None,
    arena: Tensor | None = None,
) -> Tensor:
    """Return the backend's attention of the case."""
    arena = filled_arena(backend, case) if arena is None else arena
    query = case.queries(rows)
    out = torch.full_like(query, float("nan"))
    backend.paged_attention(query, arena, case.batch(rows), params or plain_params(case), case.layout, out)
    return out
