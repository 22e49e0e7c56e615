"""Writing keys and values into native blocks; copying and clearing whole blocks in all layers."""

import triton
import triton.language as tl

from kernels.triton.places import FORMAT_MASK, NATIVE, block_begin, block_offset, bytes_of_block, is_block, is_in_arena

CHUNK_BYTES = 8192  # of a block that one program copies or clears

_CHUNK_WORDS = tl.constexpr(CHUNK_BYTES // 4)


@triton.jit(do_not_specialize=["slot_mapping", "num_slabs"])
def write_kernel(
    layer_arena, key, value, slot_mapping, num_slabs,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,  # elements
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr, NATIVE_DTYPE: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values of all heads, unless its slot is outside the arena. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block_id = slot // BLOCK_SIZE
    if (slot < 0) | (is_in_arena(block_id, num_slabs, SLAB_BYTES // BLOCK_BYTES[NATIVE]) == 0):
        return
    element = tl.arange(0, ELEMENTS)
    head, channel = element // HEAD_SIZE, element % HEAD_SIZE
    mask = element < NUM_KV_HEADS * HEAD_SIZE
    block = layer_arena + block_offset(block_id, num_slabs, SLAB_BYTES, BLOCK_BYTES[NATIVE])
    at = (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_SIZE + channel
    target = block.to(tl.pointer_type(NATIVE_DTYPE)) + at
    key_row = tl.load(key + token * key_token_stride + head * key_head_stride + channel, mask=mask)
    tl.store(target, key_row.to(NATIVE_DTYPE), mask=mask)
    value_row = tl.load(value + token * value_token_stride + head * value_head_stride + channel, mask=mask)
    tl.store(target + NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE, value_row.to(NATIVE_DTYPE), mask=mask)


@triton.jit
def block_words(arena, entry, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return the addresses of this program's words of a block in its layer."""
    layer = tl.program_id(1).to(tl.int64) * num_slabs * SLAB_BYTES
    block = arena + layer + block_begin(entry, SLAB_BYTES, BLOCK_BYTES)
    return block.to(tl.pointer_type(tl.int32)) + tl.program_id(2) * _CHUNK_WORDS + tl.arange(0, _CHUNK_WORDS)


@triton.jit(do_not_specialize=["src_entries", "dst_entries", "num_slabs"])
def copy_kernel(arena, src_entries, dst_entries, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Copy a chunk of a block. Grid: entries, layers, chunks of the largest block."""
    source = tl.load(src_entries + tl.program_id(0))
    target = tl.load(dst_entries + tl.program_id(0))
    alike = (source & FORMAT_MASK) == (target & FORMAT_MASK)
    is_source = is_block(source, num_slabs, SLAB_BYTES, BLOCK_BYTES)
    if alike & is_source & is_block(target, num_slabs, SLAB_BYTES, BLOCK_BYTES):
        num_words = bytes_of_block(source, BLOCK_BYTES) // 4
        mask = tl.program_id(2) * _CHUNK_WORDS + tl.arange(0, _CHUNK_WORDS) < num_words
        words = tl.load(block_words(arena, source, num_slabs, SLAB_BYTES, BLOCK_BYTES), mask=mask)
        tl.store(block_words(arena, target, num_slabs, SLAB_BYTES, BLOCK_BYTES), words, mask=mask)


@triton.jit(do_not_specialize=["entries", "num_slabs"])
def zero_kernel(arena, entries, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Clear a chunk of a block. Grid: entries, layers, chunks of the largest block."""
    entry = tl.load(entries + tl.program_id(0))
    if is_block(entry, num_slabs, SLAB_BYTES, BLOCK_BYTES):
        num_words = bytes_of_block(entry, BLOCK_BYTES) // 4
        mask = tl.program_id(2) * _CHUNK_WORDS + tl.arange(0, _CHUNK_WORDS) < num_words
        tl.store(block_words(arena, entry, num_slabs, SLAB_BYTES, BLOCK_BYTES), 0, mask=mask)
