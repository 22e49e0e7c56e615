"""Queries against a run of blocks: the loop over tiles of keys that prefill and decode share.

    M queries (tokens x query heads of one KV head) ──┐
                                                      ├─▶ scores [M, TILE] ─▶ running softmax ─▶ sums [M, HEAD_PAD]
    tile of TILE tokens: entries ─▶ addresses ─▶ K, V ┘

Softmax is the online one (Milakov and Gimelshein 2018, as in FlashAttention) in powers of 2: a query's state is the
largest score so far, the sum of 2^(score - largest), and the values summed with those weights.

A loop serves blocks of one format, known at compile time: a branch per block would end the pipelining, which has the
entries of one tile, the keys and values of the next and the products of a third in flight at once. Where a context's
blocks may have several formats, there is one such loop for each, from the first tile with a block of the format to the
last one, which passes over the tokens of others. Blocks come in runs of a format, as they age, so few tiles are gone
through twice; in any other order the result is right as well.

    formats   n | 4 4 4 4 4 4 4 4 4 | 8 8 8 8 8 8 | n n n     n: native, of the first block too
    tiles     |       |       |       |       |       |
    loops     n-------------------------------------n
              4-----------------------4
                                  8-------8
"""

import triton
import triton.language as tl

from kernels.triton.codes import number_of
from kernels.triton.loads import blocks_of, load_by_channel, load_by_token, load_codes, load_native
from kernels.triton.places import (
    CODECS,
    CODES,
    FLOAT8,
    FORMAT_MASK,
    KEY,
    MINIMUMS,
    NATIVE,
    SCALES,
    UINT4_BY_CHANNEL,
    VALUE,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NOWHERE = tl.constexpr(2**31 - 1)  # beyond any token
# In float16 products, weights times the scales of values are lifted by what keeps the largest scale in range, so that
# few are too small for all their bits. By codec: the largest scales are 131,008 / 255, 65,504 / 448 and 131,008 / 15.
_LIFTS = tl.constexpr((1.0, 64.0, 256.0, 4.0))
_SCAN = tl.constexpr(32)  # entries that are looked at in one go: a warp's


@triton.jit
def begin_state(M: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return the state of M queries that have met no key: largest score, sum of weights, weighted values."""
    largest = tl.full([M], float("-inf"), tl.float32)
    return largest, tl.zeros([M], tl.float32), tl.zeros([M, HEAD_PAD], tl.float32)


@triton.jit
def attend(
    query, position,  # [M, HEAD_PAD] in the dtype of products, zero in padding; [M] tokens
    largest, total, values,  # the state so far
    layer_arena, table, num_slabs, kv_head,  # `table`: the row's entries
    begin, end,  # tokens; `begin` is a multiple of TILE
    first_key, end_key,  # tokens outside of which no query of this tile sees any: never read
    MASKED: tl.constexpr,  # whether there are keys in [begin, end) that some query does not see
    FORMATS: tl.constexpr,  # that blocks may have; tokens of blocks of others are left out, but where there is one only
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the state after the keys of tokens [begin, end), whose blocks have any of the formats, in any order."""
    for i in tl.static_range(len(FORMATS)):
        largest, total, values = attend_format(
            query, position, largest, total, values, layer_arena, table, num_slabs, kv_head,
            begin, end, first_key, end_key, FORMATS[i], len(FORMATS) > 1, MASKED, SCALE, WINDOW, SOFT_CAP,
            NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES[FORMATS[i]], PLANES[FORMATS[i]],
            NATIVE_DTYPE, DOT_DTYPE, TILE, STAGES,
        )  # fmt: skip
    return largest, total, values


@triton.jit
def find_run(table, begin, end, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return where the first block of a format among tokens [begin, end) begins and the last one ends."""
    end_block = tl.cdiv(end, BLOCK_SIZE)
    first = tl.zeros([_SCAN], tl.int32) + end_block
    behind = tl.zeros([_SCAN], tl.int32)
    for block in range(begin // BLOCK_SIZE, end_block, _SCAN):
        idx = block + tl.arange(0, _SCAN)
        entry = tl.load(table + idx, mask=idx < end_block, other=-1)  # which has the code of no format
        is_format = (entry & FORMAT_MASK) == FORMAT
        first = tl.minimum(first, tl.where(is_format, idx, end_block))
        behind = tl.maximum(behind, tl.where(is_format, idx + 1, 0))
    return tl.maximum(tl.min(first, 0) * BLOCK_SIZE, begin), tl.minimum(tl.max(behind, 0) * BLOCK_SIZE, end)


@triton.jit
def attend_format(
    query, position, largest, total, values, layer_arena, table, num_slabs, kv_head, begin, end, first_key, end_key,
    FORMAT: tl.constexpr,
    AMONG_OTHERS: tl.constexpr,  # whether blocks may have other formats, and are to be passed over then
    MASKED: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr,  # of the format
    NATIVE_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the state after the keys of those tokens of [begin, end) whose blocks have one format."""
    FACTOR: tl.constexpr = (SCALE if SOFT_CAP is None else SOFT_CAP) * _LOG2_E
    VALUE_CODEC: tl.constexpr = CODECS[FORMAT][VALUE]
    LIFT: tl.constexpr = _LIFTS[VALUE_CODEC] if tl.float16 == DOT_DTYPE else 1.0
    first = 0
    if AMONG_OTHERS:
        # The loop begins at 0, for where it began at what was found in memory, the compiler would lose sight of how
        # addresses are aligned.
        run_begin, run_end = find_run(table, tl.maximum(begin, first_key), end, FORMAT, BLOCK_SIZE)
        first = begin + tl.maximum(run_begin - begin, 0) // TILE * TILE
        begin, end = 0, run_end - first
    if FORMAT != NATIVE:
        query_sum = tl.sum(query.to(tl.float32), 1)
        values *= LIFT
        shift = tl.zeros_like(total)  # what the values' minimums add to every channel
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        tile = first + at
        token = tile + tl.arange(0, TILE)
        block, held = blocks_of(
            table, num_slabs, token, 1, first_key, end_key,
            FORMAT, AMONG_OTHERS, MASKED, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES,
        )  # fmt: skip
        if FORMAT == NATIVE:
            key, value = load_native(
                layer_arena, kv_head, block, token % BLOCK_SIZE, held, MASKED,
                NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, NATIVE_DTYPE,
            )  # fmt: skip
            score = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
        else:
            even = tile + 2 * tl.arange(0, TILE // 2)
            pair, pair_held = blocks_of(
                table, num_slabs, even, 2, first_key, end_key,
                FORMAT, AMONG_OTHERS, MASKED, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES,
            )  # fmt: skip
            scales = layer_arena + pair + (kv_head * BLOCK_SIZE + even % BLOCK_SIZE) * 2  # of float16
            score = score_codes(
                query, query_sum, layer_arena, table, num_slabs, kv_head, tile, block, held, scales, pair_held,
                first_key, end_key, FORMAT, AMONG_OTHERS, MASKED, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, SLAB_BYTES,
                BLOCK_BYTES, PLANES[KEY], DOT_DTYPE, TILE,
            )  # fmt: skip
            value = load_codes(
                layer_arena + PLANES[VALUE][CODES], kv_head, block, token % BLOCK_SIZE, held,
                VALUE_CODEC, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE,
            )  # fmt: skip
        if AMONG_OTHERS:
            # Fetched once more: what both addresses and scores depend on, the compiler does not pipeline.
            entry = tl.load(table + token // BLOCK_SIZE, mask=token < end_key, other=-1)
            token = tl.where((entry & FORMAT_MASK) == FORMAT, token, _NOWHERE)
        score = mask_score(score, token, position, MASKED, SCALE, WINDOW, SOFT_CAP)

        # The factor is applied within the exponent, where it costs no operation of its own.
        peak = tl.maximum(largest, tl.max(score, 1) * FACTOR)
        # A query that has seen no key yet has no largest score: any finite number will do in its place.
        base = tl.where(peak == _NEVER, 0.0, peak)
        weight = tl.exp2(score * FACTOR - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weight, 1)
        if FORMAT != NATIVE:
            if VALUE_CODEC != FLOAT8:
                minimum = load_by_token(scales + PLANES[VALUE][MINIMUMS], pair_held)
                shift = shift * fade + tl.sum(weight * minimum[None, :], 1)
            weight *= load_by_token(scales + PLANES[VALUE][SCALES], pair_held)[None, :] * LIFT
            value = number_of(value, VALUE_CODEC)
        values = tl.dot(weight.to(DOT_DTYPE), value.to(DOT_DTYPE), values * fade[:, None], input_precision="ieee")
        largest = peak
    if FORMAT != NATIVE:
        values = values * (1 / LIFT) + shift[:, None]
    return largest, total, values


@triton.jit
def score_codes(
    query, query_sum,  # [M, HEAD_PAD], and the sum of each
    layer_arena, table, num_slabs, kv_head,
    tile, block, held,  # the tile's first token; as load_codes takes them
    scales, scales_held,  # as load_by_token takes them, but for the plane
    first_key, end_key,
    FORMAT: tl.constexpr, AMONG_OTHERS: tl.constexpr, MASKED: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr,  # of keys
    DOT_DTYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the products of queries and keys that are codes, float32 [M, TILE].

    Scales and minimums by token stay outside the product: q.k = scale * q.code + minimum * sum(q). Those by channel do
    not: such keys become numbers before it.
    """
    CODEC: tl.constexpr = CODECS[FORMAT][KEY]
    offset = (tile + tl.arange(0, TILE)) % BLOCK_SIZE
    codes = load_codes(
        layer_arena + PLANES[CODES], kv_head, block, offset, held, CODEC, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE
    )  # fmt: skip
    key = number_of(codes, CODEC)
    if CODEC == UINT4_BY_CHANNEL:
        SPAN: tl.constexpr = TILE if TILE < BLOCK_SIZE else BLOCK_SIZE
        group, group_held = blocks_of(
            table, num_slabs, tile + SPAN * tl.arange(0, TILE // SPAN), SPAN, first_key, end_key,
            FORMAT, AMONG_OTHERS, MASKED, BLOCK_SIZE, SLAB_BYTES, BLOCK_BYTES,
        )  # fmt: skip
        scale_plane, minimum_plane = layer_arena + PLANES[SCALES], layer_arena + PLANES[MINIMUMS]
        scale = load_by_channel(scale_plane, kv_head, group, group_held, SPAN, HEAD_SIZE, HEAD_PAD)
        minimum = load_by_channel(minimum_plane, kv_head, group, group_held, SPAN, HEAD_SIZE, HEAD_PAD)
        key = key * scale + minimum
    score = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
    if CODEC != UINT4_BY_CHANNEL:
        score *= load_by_token(scales + PLANES[SCALES], scales_held)[None, :]
        if CODEC != FLOAT8:
            score += query_sum[:, None] * load_by_token(scales + PLANES[MINIMUMS], scales_held)[None, :]
    return score


@triton.jit
def mask_score(
    score, token, position,  # [M, TILE]; [TILE]; [M]
    MASKED: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Return scores after the soft cap, but for its factor; minus infinity for keys that a query does not see."""
    if SOFT_CAP is not None:
        # tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, and two steps where a library call is twenty.
        score = 1 - 2 / (1 + tl.exp2(score * (2 * SCALE / SOFT_CAP * _LOG2_E)))
    if MASKED:
        seen = token[None, :] <= position[:, None]
        if WINDOW is not None:
            seen &= token[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, score, _NEVER)
    return score


@triton.jit
def finish(total, values):
    """Return the attention of queries whose state is complete; zero for one that saw no key."""
    return values / tl.where(total == 0.0, 1.0, total)[:, None]
