"""Where native blocks lie in a layer's arena, for compiled code; `kernels.formats` says the same for Python."""

from kernels.cpu.runtime import inlined
from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format

FINE, BAD_FORMAT, OUT_OF_ARENA, BAD_ROW = 0, 1, 2, 3  # how a launch went

_FORMAT_MASK = (1 << ENTRY_FORMAT_BITS) - 1
_NATIVE = int(Format.NATIVE)


@inlined
def block_offset(block_id: int, slab_bytes: int, block_bytes: int) -> int:
    """Return where a block begins, in bytes from the begin of the layer's arena."""
    return block_id // PLACES_PER_SLAB * slab_bytes + block_id % PLACES_PER_SLAB * block_bytes


@inlined
def entry_offset(entry: int, slab_bytes: int, block_bytes: int) -> int:
    """Return where the block of an entry begins, in bytes from the begin of the layer's arena."""
    return block_offset(entry >> ENTRY_FORMAT_BITS, slab_bytes, block_bytes)


@inlined
def check_block(block_id: int, slab_bytes: int, block_bytes: int, arena_bytes: int) -> int:
    """Return FINE, or OUT_OF_ARENA where no such block lies in the arena."""
    beyond_slab = (block_id % PLACES_PER_SLAB + 1) * block_bytes > slab_bytes
    beyond_arena = block_offset(block_id, slab_bytes, block_bytes) + block_bytes > arena_bytes
    return OUT_OF_ARENA if block_id < 0 or beyond_slab or beyond_arena else FINE


@inlined
def check_entry(entry: int, slab_bytes: int, block_bytes: int, arena_bytes: int) -> int:
    """Return FINE, BAD_FORMAT where the entry's format is not native, or OUT_OF_ARENA."""
    if entry & _FORMAT_MASK != _NATIVE:
        return BAD_FORMAT
    return check_block(entry >> ENTRY_FORMAT_BITS, slab_bytes, block_bytes, arena_bytes)
