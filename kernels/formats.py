"""How KV blocks lie in the arena: formats, block-table entries, sizes. Torch-free, so that anybody may ask.

Each layer's arena is cut in equal slabs, each the bytes of `slab_blocks` native blocks. A slab holds blocks of one
format at a time, at places 0, 1, 2 ...; a block-table entry names a block and its format in one int32:

      31            11 10         3 2      0
     +----------------+------------+--------+
     |    slab_idx    |   place    | format |        block_id = slab_idx * 256 + place
     +----------------+------------+--------+

The block's bytes begin at slab_idx * slab_bytes + place * block_bytes(format), in 64-bit arithmetic. In a block lie K
of all heads, then V of all heads. Token slots are block_id * block_size + offset in the block.
"""

from dataclasses import dataclass
from enum import IntEnum

from kernels.errors import UnsupportedFormatError

ENTRY_FORMAT_BITS = 3
PLACES_PER_SLAB = 256

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Format(IntEnum):
    """How a block's bytes encode keys and values; the code is part of every block-table entry (0 to 7)."""

    NATIVE = 0  # the KV dtype itself: bfloat16, float16 or float32


def entry(block_id: int, fmt: Format) -> int:
    """Return the block-table entry of a block in a format."""
    return block_id << ENTRY_FORMAT_BITS | fmt


def block_of(entry: int) -> int:
    """Return the block id of a block-table entry."""
    return entry >> ENTRY_FORMAT_BITS


def format_of(entry: int) -> Format:
    """Return the format of a block-table entry; raises UnsupportedFormatError on a code that names none."""
    code = entry & ((1 << ENTRY_FORMAT_BITS) - 1)
    try:
        return Format(code)
    except ValueError:
        raise UnsupportedFormatError(f"block-table entry {entry} carries the unknown format code {code}") from None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one layer's KV, and of the arena that holds it: uint8 [num_layers, num_slabs, slab_bytes]."""

    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    native_dtype: str  # "bfloat16", "float16" or "float32"
    slab_blocks: int = 16  # native blocks a slab

    def __post_init__(self) -> None:
        if self.native_dtype not in _DTYPE_BYTES:
            raise ValueError(f"native_dtype is {self.native_dtype!r}, not one of {', '.join(_DTYPE_BYTES)}")
        for name in ("num_kv_heads", "head_size", "block_size", "slab_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, not at least 1")
        if self.slab_blocks > PLACES_PER_SLAB:
            raise ValueError(
                f"slab_blocks is {self.slab_blocks}, above {PLACES_PER_SLAB}, the places that an entry can name"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one native key or value element."""
        return _DTYPE_BYTES[self.native_dtype]

    def block_bytes(self, fmt: Format) -> int:
        """Return the bytes of one block, keys and values of all heads of one layer."""
        match fmt:
            case Format.NATIVE:
                return 2 * self.num_kv_heads * self.block_size * self.head_size * self.element_bytes

    def blocks_per_slab(self, fmt: Format) -> int:
        """Return how many blocks of a format a slab holds."""
        return min(PLACES_PER_SLAB, self.slab_bytes // self.block_bytes(fmt))

    @property
    def slab_bytes(self) -> int:
        """Bytes of one slab of one layer."""
        return self.slab_blocks * self.block_bytes(Format.NATIVE)

    def byte_offset(self, entry: int) -> int:
        """Return where the block of an entry begins in its layer's arena; raises UnsupportedFormatError."""
        slab_idx, place = divmod(block_of(entry), PLACES_PER_SLAB)
        return slab_idx * self.slab_bytes + place * self.block_bytes(format_of(entry))
