"""What a tile of keys and values is fetched with: native ones, codes, and the scales and minimums of these."""

import triton
import triton.language as tl

from kernels.triton.codes import channels, join_halves
from kernels.triton.places import FORMAT_BITS, FORMAT_MASK, UINT4, block_offset


@triton.jit
def blocks_of(
    table, num_slabs, token, span, first_key, end_key,
    FORMAT: tl.constexpr, AMONG_OTHERS: tl.constexpr, MASKED: tl.constexpr,  # as in tiles.attend_format
    BLOCK_SIZE: tl.constexpr, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Return where the blocks of tokens begin, and whether they are to be read.

    That is where any of the `span` tokens from the one given on is in [first_key, end_key), and where there may be
    blocks of others, if the format is the one.
    """
    held = (token + (span - 1) >= first_key) & (token < end_key)
    entries = table + token // BLOCK_SIZE
    entry = tl.load(entries, mask=held, other=0) if MASKED else tl.load(entries)
    if AMONG_OTHERS:
        held &= (entry & FORMAT_MASK) == FORMAT
    return block_offset(entry >> FORMAT_BITS, num_slabs, SLAB_BYTES, BLOCK_BYTES), held


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
    channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    row = block + (kv_head * BLOCK_SIZE + offset) * (HEAD_SIZE * ELEMENT_BYTES)
    key_row = (layer_arena + row).to(tl.pointer_type(NATIVE_DTYPE))
    keys = key_row[:, None] + channel[None, :]
    values = keys + NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE
    if MASKED:
        mask = held[:, None]
        if HEAD_PAD > HEAD_SIZE:
            mask &= is_channel[None, :]
        return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)
    if HEAD_PAD > HEAD_SIZE:
        mask = is_channel[None, :]
        return tl.load(keys, mask=mask, other=0.0), tl.load(values, mask=mask, other=0.0)
    return tl.load(keys), tl.load(values)


@triton.jit
def load_codes(
    plane, kv_head,
    block, offset, held,  # as in load_native
    CODEC: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Return the codes of tokens' keys or values, uint8 [TILE, HEAD_PAD]; zero where nothing is read."""
    row = kv_head * BLOCK_SIZE + offset
    mask = held[:, None]
    if CODEC >= UINT4:
        HALF: tl.constexpr = HEAD_SIZE // 2
        channel = tl.arange(0, HEAD_PAD // 2)
        if HEAD_PAD > HEAD_SIZE:
            mask &= (channel < HALF)[None, :]
        codes = join_halves(tl.load((plane + block + row * HALF)[:, None] + channel[None, :], mask=mask, other=0))
    else:
        channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
        if HEAD_PAD > HEAD_SIZE:
            mask &= is_channel[None, :]
        codes = tl.load((plane + block + row * HEAD_SIZE)[:, None] + channel[None, :], mask=mask, other=0)
    return codes


@triton.jit
def load_by_token(words, held):
    """Return scales or minimums of a tile's tokens, float32 [TILE], from the addresses of each second one.

    Two are fetched in one word, for the shortest copy that can be on its way while others are multiplied is 4 bytes.
    """
    pair = tl.load(words.to(tl.pointer_type(tl.int32)), mask=held, other=0)
    halves = tl.join(pair & 0xFFFF, (pair >> 16) & 0xFFFF)
    numbers = tl.reshape(halves, (2 * pair.shape[0],)).to(tl.int16).to(tl.float16, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def load_by_channel(
    plane, kv_head, block, held, SPAN: tl.constexpr, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr
):  # fmt: skip
    """Return scales or minimums of blocks' channels, float32 [TILE, HEAD_PAD]: those of a block for its SPAN tokens."""
    channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    mask = held[:, None]
    if HEAD_PAD > HEAD_SIZE:
        mask &= is_channel[None, :]
    rows = (plane + block).to(tl.pointer_type(tl.float16)) + kv_head * HEAD_SIZE
    numbers = tl.load(rows[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    repeated = tl.broadcast_to(numbers[:, None, :], (block.shape[0], SPAN, HEAD_PAD))
    return tl.reshape(repeated, (block.shape[0] * SPAN, HEAD_PAD))
