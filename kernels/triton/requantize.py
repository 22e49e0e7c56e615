"""Full blocks written anew in narrower formats.

A program reads the keys and values of one head of a block, all tokens of it, into registers, and writes their codes.
Which formats they have is known on the device only: each pair of formats is a branch, of which a program takes one.
"""

import triton
import triton.language as tl

from kernels.triton.codes import channels, join_halves, number_of, pack_halves, quantize
from kernels.triton.places import (
    AS_COMPUTED,
    CODECS,
    CODES,
    FLOAT8,
    FORMAT_MASK,
    MINIMUMS,
    NUM_FORMATS,
    SCALES,
    UINT4,
    UINT4_BY_CHANNEL,
    block_begin,
    is_block,
)


@triton.jit(do_not_specialize=["src_entries", "dst_entries", "num_slabs"])
def requantize_kernel(
    arena, src_entries, dst_entries, num_slabs,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, PLANES: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Write one head of a block anew, unless an entry is bad or no narrower. Grid: entries, layers, KV heads."""
    source = tl.load(src_entries + tl.program_id(0))
    target = tl.load(dst_entries + tl.program_id(0))
    if not is_block(source, num_slabs, SLAB_BYTES, BLOCK_BYTES):
        return
    if not is_block(target, num_slabs, SLAB_BYTES, BLOCK_BYTES):
        return
    layer = arena + tl.program_id(1).to(tl.int64) * num_slabs * SLAB_BYTES
    source_block = layer + block_begin(source, SLAB_BYTES, BLOCK_BYTES)
    target_block = layer + block_begin(target, SLAB_BYTES, BLOCK_BYTES)
    for SOURCE in tl.static_range(NUM_FORMATS - 1):
        for TARGET in tl.static_range(SOURCE + 1, NUM_FORMATS):
            if ((source & FORMAT_MASK) == SOURCE) & ((target & FORMAT_MASK) == TARGET):
                for SIDE in tl.static_range(2):
                    requantize_side(
                        source_block, target_block, tl.program_id(2), CODECS[SOURCE][SIDE], CODECS[TARGET][SIDE],
                        PLANES[SOURCE][SIDE], PLANES[TARGET][SIDE], HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, NATIVE_DTYPE,
                    )  # fmt: skip


@triton.jit
def requantize_side(
    source, target, head,  # where the blocks begin
    SOURCE_CODEC: tl.constexpr, TARGET_CODEC: tl.constexpr, SOURCE_PLANES: tl.constexpr, TARGET_PLANES: tl.constexpr,
    HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, NATIVE_DTYPE: tl.constexpr,
):  # fmt: skip
    """Write the keys, or the values, of one head anew; codes that stay as they are, are copied."""
    _, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    AXIS: tl.constexpr = 0 if TARGET_CODEC == UINT4_BY_CHANNEL else 1
    if SOURCE_CODEC == AS_COMPUTED:
        plane = (source + SOURCE_PLANES[CODES]).to(tl.pointer_type(NATIVE_DTYPE))
        at, mask = elements(head, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, False)
        x = tl.load(plane + at, mask=mask, other=0.0).to(tl.float32)
        codes, scale, minimum = quantize(x, is_channel, TARGET_CODEC, AXIS)
    else:
        PACKED: tl.constexpr = SOURCE_CODEC >= UINT4
        at, mask = elements(head, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, PACKED)
        codes = tl.load(source + SOURCE_PLANES[CODES] + at, mask=mask, other=0)
        if PACKED:
            codes = join_halves(codes)
        scale_at, _ = groups(head, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, 1)
        scale = tl.load((source + SOURCE_PLANES[SCALES]).to(tl.pointer_type(tl.float16)) + scale_at)
        minimum = scale
        if SOURCE_CODEC != FLOAT8:
            minimum = tl.load((source + SOURCE_PLANES[MINIMUMS]).to(tl.pointer_type(tl.float16)) + scale_at)
        if SOURCE_CODEC != TARGET_CODEC:
            x = number_of(codes, SOURCE_CODEC) * scale.to(tl.float32)
            if SOURCE_CODEC != FLOAT8:
                x += minimum.to(tl.float32)
            codes, scale, minimum = quantize(x, is_channel, TARGET_CODEC, AXIS)
    IS_PACKED: tl.constexpr = TARGET_CODEC >= UINT4
    if IS_PACKED:
        codes = pack_halves(codes)
    to, mask = elements(head, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, IS_PACKED)
    tl.store(target + TARGET_PLANES[CODES] + to, codes, mask=mask)
    scale_to, is_group = groups(head, HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, AXIS)
    tl.store((target + TARGET_PLANES[SCALES]).to(tl.pointer_type(tl.float16)) + scale_to, scale, mask=is_group)
    if TARGET_CODEC != FLOAT8:
        tl.store((target + TARGET_PLANES[MINIMUMS]).to(tl.pointer_type(tl.float16)) + scale_to, minimum, mask=is_group)


@triton.jit
def elements(head, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PACKED: tl.constexpr):
    """Return where a head's elements stand in a plane, [BLOCK_SIZE, HEAD_PAD], half as wide if PACKED, and a mask."""
    WIDTH: tl.constexpr = HEAD_SIZE // 2 if PACKED else HEAD_SIZE
    if PACKED:
        channel = tl.arange(0, HEAD_PAD // 2)
        is_channel = channel < WIDTH
    else:
        channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
    token = tl.arange(0, BLOCK_SIZE)
    mask = (token >= 0)[:, None] & is_channel[None, :]
    return (head * BLOCK_SIZE + token)[:, None] * WIDTH + channel[None, :], mask


@triton.jit
def groups(head, HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, AXIS: tl.constexpr):
    """Return where a head's scales stand in a plane and a mask: [BLOCK_SIZE, 1] by token (AXIS 1), or [1, HEAD_PAD]."""
    if AXIS == 1:
        token = tl.arange(0, BLOCK_SIZE)
        at, mask = (head * BLOCK_SIZE + token)[:, None], (token >= 0)[:, None]
    else:
        channel, is_channel = channels(HEAD_SIZE, HEAD_PAD)
        at, mask = (head * HEAD_SIZE + channel)[None, :], is_channel[None, :]
    return at, mask
