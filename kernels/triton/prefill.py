"""Attention of prefill chunks: rows with two queries or more.

A program takes one KV head and a tile of a row's queries, TILE_ROWS rows of a product: TILE_ROWS // GROUP tokens with
all GROUP query heads that share the KV head, so each K and V is fetched once for all of them. How many tiles a row has
is known on the device only, so the grid is made for the most that the number of tokens allows, and a program finds its
row by a binary search in `cu_seqlens_q`: row r's tiles begin at cu_seqlens_q[r] // tile + r, which leaves room for
every row's last, partly filled tile.
"""

import triton
import triton.language as tl

from kernels.triton.codes import channels
from kernels.triton.tiles import attend, begin_state, finish


def num_tiles(num_tokens: int, num_rows: int, tile_queries: int) -> int:
    """Return how many tiles of queries a launch has room for, whatever the rows' lengths."""
    return num_tokens // tile_queries + num_rows


@triton.jit
def find_row(cu_seqlens_q, num_rows, tile, TILE_QUERIES: tl.constexpr):
    """Return the row that a tile belongs to: the last one whose tiles begin at it or before."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=[
        "block_table",
        "context_lens",
        "cu_seqlens_q",
        "num_rows",
        "num_tokens",
        "table_width",
        "num_slabs",
    ]
)
def prefill_kernel(
    query, out, layer_arena,
    block_table, context_lens, cu_seqlens_q,
    num_rows, num_tokens, table_width, num_slabs,
    query_stride, out_stride,  # elements from token to token
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr,
    FORMATS: tl.constexpr, NATIVE_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of a row's queries. Grid: tiles, KV heads; the last tiles, with most keys, go first."""
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = find_row(cu_seqlens_q, num_rows, tile, TILE_QUERIES)
    begin = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - begin
    first = (tile - (begin // TILE_QUERIES + row)) * TILE_QUERIES
    if (query_len < 2) | (first >= query_len):
        return
    context_len = tl.minimum(tl.load(context_lens + row), table_width * BLOCK_SIZE)

    lane = tl.arange(0, TILE_ROWS)
    query_idx = first + lane // GROUP
    token = (begin + query_idx).to(tl.int64)
    used = (lane < TILE_QUERIES * GROUP) & (query_idx < query_len) & (token < num_tokens)
    channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    mask = used[:, None] & is_channel[None, :]
    head_at = (kv_head * GROUP + lane % GROUP) * HEAD_SIZE
    queries = (query + token * query_stride + head_at)[:, None] + channel[None, :]
    rows = tl.load(queries, mask=mask, other=0.0).to(DOT_DTYPE)

    position = context_len - query_len + query_idx
    low = context_len - query_len + first
    end_key = context_len - query_len + tl.minimum(first + TILE_QUERIES, query_len)
    largest, total, values = begin_state(TILE_ROWS, HEAD_PAD)
    if WINDOW is None:
        first_key = 0
        begin_key = 0
        if len(FORMATS) == 1:
            # Tiles of keys that every query of this tile sees need no masks.
            begin_key = tl.maximum(low + 1, 0) // TILE * TILE
            largest, total, values = attend(
                rows, position, largest, total, values, layer_arena, block_table + row.to(tl.int64) * table_width,
                num_slabs, kv_head, 0, begin_key, first_key, end_key, False, FORMATS, SCALE, WINDOW, SOFT_CAP,
                NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES, PLANES, NATIVE_DTYPE,
                DOT_DTYPE, TILE, STAGES,
            )  # fmt: skip
    else:
        first_key = tl.maximum(low - WINDOW + 1, 0)
        begin_key = first_key // TILE * TILE
    largest, total, values = attend(
        rows, position, largest, total, values, layer_arena, block_table + row.to(tl.int64) * table_width,
        num_slabs, kv_head, begin_key, end_key, first_key, end_key, True, FORMATS, SCALE, WINDOW, SOFT_CAP,
        NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES, PLANES, NATIVE_DTYPE, DOT_DTYPE,
        TILE, STAGES,
    )  # fmt: skip
    outs = (out + token * out_stride + head_at)[:, None] + channel[None, :]
    tl.store(outs, finish(total, values).to(out.dtype.element_ty), mask=mask)
