"""Where blocks lie in a layer's arena, for compiled code; `kernels.formats` says the same for Python.

The block of an entry is what stands above its FORMAT_BITS. A place outside the arena is moved inside it: the host
cannot look at entries without waiting for the device, and a wrong entry must cost a wrong answer, not a read of
foreign memory.
"""

import triton
import triton.language as tl

from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format

NATIVE = tl.constexpr(int(Format.NATIVE))
FORMAT_BITS = tl.constexpr(ENTRY_FORMAT_BITS)
FORMAT_MASK = tl.constexpr((1 << ENTRY_FORMAT_BITS) - 1)
PLACES = tl.constexpr(PLACES_PER_SLAB)
_PLACE_BITS = tl.constexpr(PLACES_PER_SLAB.bit_length() - 1)


@triton.jit
def is_in_arena(block_id, num_slabs, SLAB_BLOCKS: tl.constexpr):
    """Return whether blocks lie in the arena, SLAB_BLOCKS of which lie in a slab."""
    return (block_id >= 0) & (block_id // PLACES < num_slabs) & (block_id % PLACES < SLAB_BLOCKS)


@triton.jit
def block_offset(block_id, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return where blocks begin, int64 bytes from the begin of the layer's arena; always inside it."""
    slab_idx = tl.minimum(tl.maximum(block_id >> _PLACE_BITS, 0), num_slabs - 1)
    place = tl.minimum(block_id & (PLACES - 1), SLAB_BYTES // BLOCK_BYTES - 1)
    return slab_idx.to(tl.int64) * SLAB_BYTES + place * BLOCK_BYTES
