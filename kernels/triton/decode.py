"""Attention of decodes: rows with one query, which wait for memory and not for products.

The context is cut in splits, so that a long row keeps more than one multiprocessor busy (flash-decoding). A program
takes one KV head with all query heads that share it, and every SLICES-th split of a row; each split's result goes to
memory, and a second kernel merges a row's. Where splits end depends on the row's context alone: the number of slices,
which depends on how many rows there are, changes no bit of the result.

    context  |------ split 0 ------|------ split 1 ------|-- split 2 --|     MIN_SPLIT tokens each; longer ones
    slices          program 0             program 1         program 0        past MAX_SPLITS * MIN_SPLIT tokens
"""

import triton
import triton.language as tl

from kernels.triton.codes import channels
from kernels.triton.tiles import attend, begin_state, finish

MIN_SPLIT = 256  # tokens; a multiple of every tile. A split's result is 1/100 of the bytes that it read
MAX_SPLITS = 32  # of a row: bounds the memory that results take

_MIN_SPLIT, _MAX_SPLITS = tl.constexpr(MIN_SPLIT), tl.constexpr(MAX_SPLITS)


def most_splits(table_tokens: int) -> int:
    """Return the most splits that a row with so many tokens in its block table can have."""
    return max(1, min(MAX_SPLITS, -(-table_tokens // MIN_SPLIT)))


@triton.jit
def cut(context_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the first key that a context's last token sees, how many splits there are, and the tokens of each."""
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(context_len - WINDOW, 0)
    first_tile = first_key // TILE
    num_tiles = tl.cdiv(context_len, TILE) - first_tile
    split_tiles = tl.maximum(tl.cdiv(num_tiles, _MAX_SPLITS), _MIN_SPLIT // TILE)
    return first_key, tl.maximum(tl.cdiv(num_tiles, split_tiles), 1), split_tiles * TILE


@triton.jit(
    do_not_specialize=[
        "block_table",
        "context_lens",
        "cu_seqlens_q",
        "num_tokens",
        "table_width",
        "num_slabs",
        "max_splits",
    ]
)
def decode_kernel(
    query, out, split_outs, split_sums,  # [rows, query heads, max_splits, head size] and [..., max_splits], float32
    layer_arena,
    block_table, context_lens, cu_seqlens_q,
    num_tokens, table_width, num_slabs, max_splits,
    query_stride, out_stride,  # elements from token to token
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr,
    FORMATS: tl.constexpr, NATIVE_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    GROUP_PAD: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend from a row's one token to every num_programs(2)-th split. Grid: KV heads, rows, slices."""
    kv_head, row = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - begin
    if (query_len != 1) | (begin >= num_tokens):
        return
    context_len = tl.minimum(tl.load(context_lens + row), table_width * BLOCK_SIZE)
    first_key, num_splits, split_tokens = cut(context_len, WINDOW, TILE)

    lane = tl.arange(0, GROUP_PAD)
    channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    head = kv_head * GROUP + lane
    mask = (lane < GROUP)[:, None] & is_channel[None, :]
    at = (head * HEAD_SIZE)[:, None] + channel[None, :]
    heads = tl.load(query + begin.to(tl.int64) * query_stride + at, mask=mask, other=0.0).to(DOT_DTYPE)
    position = tl.full([GROUP_PAD], 0, tl.int32) + (context_len - 1)
    table = block_table + row.to(tl.int64) * table_width

    for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        split_begin = first_key // TILE * TILE + split * split_tokens
        largest, total, values = begin_state(GROUP_PAD, HEAD_PAD)
        largest, total, values = attend(
            heads, position, largest, total, values, layer_arena, table, num_slabs, kv_head,
            split_begin, tl.minimum(split_begin + split_tokens, context_len), first_key, context_len,
            True, FORMATS, SCALE, WINDOW, SOFT_CAP, NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE,
            SLAB_BYTES, BLOCK_BYTES, PLANES, NATIVE_DTYPE, DOT_DTYPE, TILE, STAGES,
        )  # fmt: skip
        result = finish(total, values)
        if num_splits == 1:
            outs = out + begin.to(tl.int64) * out_stride + at
            tl.store(outs, result.to(out.dtype.element_ty), mask=mask)
        else:
            part = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * max_splits + split
            tl.store(split_outs + (part * HEAD_SIZE)[:, None] + channel[None, :], result, mask=mask)
            tl.store(split_sums + part, largest + tl.log2(total), mask=lane < GROUP)


@triton.jit(do_not_specialize=["context_lens", "cu_seqlens_q", "num_tokens", "table_width", "max_splits"])
def merge_kernel(
    out, split_outs, split_sums,
    context_lens, cu_seqlens_q,
    num_tokens, table_width, max_splits,
    out_stride,
    WINDOW: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row's query head, where there are more than one. Grid: query heads, rows."""
    head, row = tl.program_id(0), tl.program_id(1)
    begin = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - begin
    context_len = tl.minimum(tl.load(context_lens + row), table_width * BLOCK_SIZE)
    _, num_splits, _ = cut(context_len, WINDOW, TILE)
    if (query_len != 1) | (begin >= num_tokens) | (num_splits < 2):
        return
    split, channel = tl.arange(0, SPLITS), tl.arange(0, HEAD_PAD)
    is_split = split < num_splits
    part = (row.to(tl.int64) * tl.num_programs(0) + head) * max_splits + split
    # The logarithm of each split's sum of weights says how much of the whole it is.
    sums = tl.load(split_sums + part, mask=is_split, other=float("-inf"))
    weight = tl.exp2(sums - tl.max(sums, 0))
    mask = is_split[:, None] & (channel < HEAD_SIZE)[None, :]
    results = tl.load(split_outs + (part * HEAD_SIZE)[:, None] + channel[None, :], mask=mask, other=0.0)
    merged = tl.sum(results * weight[:, None], 0) / tl.sum(weight, 0)
    outs = out + begin.to(tl.int64) * out_stride + head * HEAD_SIZE + channel
    tl.store(outs, merged.to(out.dtype.element_ty), mask=channel < HEAD_SIZE)
