"""Where blocks lie in a layer's arena, for compiled code; `kernels.formats` says the same for Python.

The block of an entry is what stands above its FORMAT_BITS. A place outside the arena is moved inside it: the host
cannot look at entries without waiting for the device, and a wrong entry must cost a wrong answer, not a read of
foreign memory.
"""

import triton
import triton.language as tl

from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, RECIPES, Codec, Encoding, Format, Group, KVLayout

NATIVE = tl.constexpr(int(Format.NATIVE))
NUM_FORMATS = tl.constexpr(len(Format))
FORMAT_BITS = tl.constexpr(ENTRY_FORMAT_BITS)
FORMAT_MASK = tl.constexpr((1 << ENTRY_FORMAT_BITS) - 1)
PLACES = tl.constexpr(PLACES_PER_SLAB)
_PLACE_BITS = tl.constexpr(PLACES_PER_SLAB.bit_length() - 1)

# How keys or values are encoded: kernels.formats.Codec as a number. From UINT4 on, two codes are in a byte.
AS_COMPUTED, UINT8, FLOAT8, UINT4, UINT4_BY_CHANNEL = (tl.constexpr(number) for number in range(5))
# The two sides of a block, and the planes of a side.
KEY, VALUE = tl.constexpr(0), tl.constexpr(1)
CODES, SCALES, MINIMUMS = (tl.constexpr(number) for number in range(3))


def _codec(codec: Codec) -> tl.constexpr:
    match codec.encoding:
        case Encoding.UINT8:
            return UINT8
        case Encoding.FLOAT8:
            return FLOAT8
        case Encoding.UINT4:
            return UINT4_BY_CHANNEL if codec.group is Group.CHANNEL else UINT4
        case _:
            return AS_COMPUTED


CODECS = tl.constexpr(  # [format][side]
    tuple((_codec(RECIPES[fmt].key).value, _codec(RECIPES[fmt].value).value) for fmt in Format)
)


def block_bytes(layout: KVLayout) -> tuple[int, ...]:
    """Return the bytes of a block by format."""
    return tuple(layout.block_bytes(fmt) for fmt in Format)


def planes(layout: KVLayout) -> tuple[tuple[tuple[int | None, ...], ...], ...]:
    """Return where planes begin, bytes from a block's begin: [format][KEY, VALUE][CODES, SCALES, MINIMUMS]."""
    names = [(side, f"{side}_scale", f"{side}_minimum") for side in ("key", "value")]
    found = [layout.planes(fmt) for fmt in Format]
    return tuple(
        tuple(tuple(of[name].offset if name in of else None for name in side) for side in names) for of in found
    )


@triton.jit
def is_in_arena(block_id, num_slabs, SLAB_BLOCKS: tl.constexpr):
    """Return whether blocks lie in the arena, SLAB_BLOCKS of which lie in a slab."""
    return (block_id >= 0) & (block_id // PLACES < num_slabs) & (block_id % PLACES < SLAB_BLOCKS)


@triton.jit
def is_block(entry, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return whether an entry has a format that there is, and names a place in the arena."""
    found = is_in_arena(entry >> FORMAT_BITS, num_slabs, SLAB_BYTES // BLOCK_BYTES[0]) & ((entry & FORMAT_MASK) == 0)
    for FORMAT in tl.static_range(1, NUM_FORMATS):
        inside = is_in_arena(entry >> FORMAT_BITS, num_slabs, SLAB_BYTES // BLOCK_BYTES[FORMAT])
        found |= inside & ((entry & FORMAT_MASK) == FORMAT)
    return found


@triton.jit
def bytes_of_block(entry, BLOCK_BYTES: tl.constexpr):
    """Return the bytes of the block that an entry names."""
    size = tl.zeros([], tl.int32) + BLOCK_BYTES[0]
    for FORMAT in tl.static_range(1, NUM_FORMATS):
        size = tl.where((entry & FORMAT_MASK) == FORMAT, BLOCK_BYTES[FORMAT], size)
    return size


@triton.jit
def block_begin(entry, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return where the block that an entry names begins, as `block_offset` does, for an entry that `is_block`."""
    block_id = entry >> FORMAT_BITS
    slab = (block_id >> _PLACE_BITS).to(tl.int64) * SLAB_BYTES
    return slab + (block_id & (PLACES - 1)) * bytes_of_block(entry, BLOCK_BYTES)


@triton.jit
def block_offset(block_id, num_slabs, SLAB_BYTES: tl.constexpr, BLOCK_BYTES: tl.constexpr):
    """Return where blocks of BLOCK_BYTES begin, int64 bytes from the begin of the layer's arena; always inside it."""
    slab_idx = tl.minimum(tl.maximum(block_id >> _PLACE_BITS, 0), num_slabs - 1)
    place = tl.minimum(block_id & (PLACES - 1), SLAB_BYTES // BLOCK_BYTES - 1)
    return slab_idx.to(tl.int64) * SLAB_BYTES + place * BLOCK_BYTES
