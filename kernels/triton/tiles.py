"""Queries against a run of blocks: the loop over tiles of keys that prefill and decode share.

    M queries (tokens x query heads of one KV head) ──┐
                                                      ├─▶ scores [M, TILE] ─▶ running softmax ─▶ sums [M, HEAD_PAD]
    tile of TILE tokens: entries ─▶ addresses ─▶ K, V ┘

Softmax is the online one (Milakov and Gimelshein 2018, as in FlashAttention) in powers of 2: a query's state is the
largest score so far, the sum of 2^(score - largest), and the values summed with those weights.

All blocks of a run have one format, known at compile time: a branch per block would end the pipelining, which has the
entries of one tile, the keys and values of the next and the products of a third in flight at once. A row whose blocks
have several formats is several runs, one call of `attend_run` each. Native is the only format yet.
"""

import triton
import triton.language as tl

from kernels.triton.places import FORMAT_BITS, NATIVE, block_offset

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def begin_state(M: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return the state of M queries that have met no key: largest score, sum of weights, weighted values."""
    largest = tl.full([M], float("-inf"), tl.float32)
    return largest, tl.zeros([M], tl.float32), tl.zeros([M, HEAD_PAD], tl.float32)


@triton.jit
def attend_run(
    query, position,  # [M, HEAD_PAD] in the dtype of products, zero beyond the head size; [M] tokens
    largest, total, values,  # the state so far
    layer_arena, table, num_slabs, kv_head,  # `table`: the row's entries
    begin, end,  # tokens; `begin` is a multiple of TILE
    first_key, end_key,  # tokens outside of which no query of this tile sees any: never read
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,  # whether there are keys in [begin, end) that some query does not see
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the state after the keys of tokens [begin, end), whose blocks all have one format."""
    FACTOR: tl.constexpr = (SCALE if SOFT_CAP is None else SOFT_CAP) * _LOG2_E
    for tile in tl.range(begin, end, TILE, num_stages=STAGES):
        token = tile + tl.arange(0, TILE)
        held = (token >= first_key) & (token < end_key)
        if MASKED:
            entry = tl.load(table + token // BLOCK_SIZE, mask=held, other=0)
        else:
            entry = tl.load(table + token // BLOCK_SIZE)
        block = block_offset(entry >> FORMAT_BITS, num_slabs, SLAB_BYTES, BLOCK_BYTES)
        tl.static_assert(FORMAT == NATIVE, "only native blocks can be read yet")
        key, value = load_native(
            layer_arena, kv_head, block, token % BLOCK_SIZE, held, MASKED,
            NUM_KV_HEADS, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, NATIVE_DTYPE,
        )  # fmt: skip

        score = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
        if SOFT_CAP is not None:
            # tanh(x) = 1 - 2 / (1 + e^2x): exact at both ends, and two steps where a library call is twenty.
            score = 1 - 2 / (1 + tl.exp2(score * (2 * SCALE / SOFT_CAP * _LOG2_E)))
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW is not None:
                seen &= token[None, :] > position[:, None] - WINDOW
            score = tl.where(seen, score, _NEVER)

        # The factor is applied within the exponent, where it costs no operation of its own.
        peak = tl.maximum(largest, tl.max(score, 1) * FACTOR)
        # A query that has seen no key yet has no largest score: any finite number will do in its place.
        base = tl.where(peak == _NEVER, 0.0, peak)
        weight = tl.exp2(score * FACTOR - base[:, None])
        fade = tl.exp2(largest - base)
        total = total * fade + tl.sum(weight, 1)
        values = tl.dot(weight.to(DOT_DTYPE), value.to(DOT_DTYPE), values * fade[:, None], input_precision="ieee")
        largest = peak
    return largest, total, values


@triton.jit
def load_native(
    layer_arena, kv_head,
    block, offset, held,  # [TILE] where each token's block begins, the token's place in it, whether it is read
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Return keys and values of tokens in native blocks, each [TILE, HEAD_PAD]; zero where nothing is read."""
    ELEMENT_BYTES: tl.constexpr = NATIVE_DTYPE.primitive_bitwidth // 8
    channel = tl.arange(0, HEAD_PAD)
    row = block + (kv_head * BLOCK_SIZE + offset) * (HEAD_SIZE * ELEMENT_BYTES)
    key_row = (layer_arena + row).to(tl.pointer_type(NATIVE_DTYPE))
    keys = key_row[:, None] + channel[None, :]
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    if MASKED:
        mask = held[:, None]
        if HEAD_PAD > HEAD_SIZE:
            mask &= channel[None, :] < HEAD_SIZE
        return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)
    if HEAD_PAD > HEAD_SIZE:
        mask = channel[None, :] < HEAD_SIZE
        return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)
    return tl.load(keys), tl.load(values)


@triton.jit
def finish(total, values):
    """Return the attention of queries whose state is complete; zero for one that saw no key."""
    return values / tl.where(total == 0.0, 1.0, total)[:, None]
