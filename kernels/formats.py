"""How KV blocks lie in the arena: formats, block-table entries, sizes. Torch-free, so that anybody may ask.

Each layer's arena is cut in equal slabs, each the bytes of `slab_blocks` native blocks. A slab holds blocks of one
format at a time, at places 0, 1, 2 ...; a block-table entry names a block and its format in one int32:

      31            11 10         3 2      0
     +----------------+------------+--------+
     |    slab_idx    |   place    | format |        block_id = slab_idx * 256 + place
     +----------------+------------+--------+

The block's bytes begin at slab_idx * slab_bytes + place * block_bytes(format), in 64-bit arithmetic. A block is a list
of planes, each beginning at a multiple of 16 bytes: K of all heads, V of all heads, then scales and minimums. Token
slots are block_id * block_size + offset in the block.

Where a block is not native, an element x of a group (one token's, or one channel's of the block, of one head) is

    x = code * scale + minimum         code: 0 to 255 (int8) or 0 to 15 (int4)
    x = code * scale                   code: a float8 e4m3fn

`kernels.dispatch.Backend.requantize_blocks` says how codes, scales and minimums are made.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cache

from kernels.errors import UnsupportedFormatError

ENTRY_FORMAT_BITS = 3
FORMAT_MASK = (1 << ENTRY_FORMAT_BITS) - 1
PLACES_PER_SLAB = 256
PLANE_ALIGNMENT = 16  # bytes: the widest copy that GPUs and CPUs have in one instruction for any thread

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Format(IntEnum):
    """How a block's bytes encode keys and values; the code is part of every block-table entry (0 to 7).

    Blocks are requantized to formats of a higher code only.
    """

    NATIVE = 0  # the KV dtype itself: bfloat16, float16 or float32
    INT8 = 1
    FP8 = 2
    K8V4 = 3  # int8 keys, int4 values
    INT4 = 4


class Encoding(Enum):
    """How the elements of a plane are written."""

    NATIVE = "native"
    UINT8 = "uint8"
    FLOAT8 = "float8_e4m3fn"
    UINT4 = "uint4"  # channels d and d + ceil(head_size / 2) in one byte, d in the lower half
    FLOAT16 = "float16"


class Group(Enum):
    """Which elements of a head share a scale: all of a token, or a channel's of all tokens of the block."""

    TOKEN = "token"
    CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class Codec:
    """How the keys, or the values, of a block are encoded."""

    encoding: Encoding
    group: Group | None = None  # None: there are no scales
    has_minimum: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a format is made. Blocks of different recipe versions do not stand for each other."""

    version: int
    key: Codec
    value: Codec


_NATIVE = Codec(Encoding.NATIVE)
_INT8 = Codec(Encoding.UINT8, Group.TOKEN, has_minimum=True)
_FP8 = Codec(Encoding.FLOAT8, Group.TOKEN)
_INT4 = Codec(Encoding.UINT4, Group.TOKEN, has_minimum=True)
_INT4_KEY = Codec(Encoding.UINT4, Group.CHANNEL, has_minimum=True)  # outliers of keys sit in few channels

RECIPES = {
    Format.NATIVE: Recipe(0, _NATIVE, _NATIVE),
    Format.INT8: Recipe(1, _INT8, _INT8),
    Format.FP8: Recipe(1, _FP8, _FP8),
    Format.K8V4: Recipe(1, _INT8, _INT4),
    Format.INT4: Recipe(1, _INT4_KEY, _INT4),
}


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of a block: `width` elements for each head, the heads one after the other."""

    name: str  # key, value, key_scale, key_minimum, value_scale or value_minimum
    num_heads: int
    width: int  # elements a head; of two in a byte, an even number
    encoding: Encoding
    offset: int  # bytes from the block's begin
    num_bytes: int  # without what fills up to the next plane


def entry(block_id: int, fmt: Format) -> int:
    """Return the block-table entry of a block in a format."""
    return block_id << ENTRY_FORMAT_BITS | fmt


def block_of(entry: int) -> int:
    """Return the block id of a block-table entry."""
    return entry >> ENTRY_FORMAT_BITS


def format_of(entry: int) -> Format:
    """Return the format of a block-table entry; raises UnsupportedFormatError on a code that names none."""
    code = entry & FORMAT_MASK
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

    def planes(self, fmt: Format) -> dict[str, Plane]:
        """Return the planes of one block of one layer by name, in the order in which they lie."""
        return _planes(self, fmt)

    def block_bytes(self, fmt: Format) -> int:
        """Return the bytes of one block, keys and values of all heads of one layer."""
        return _block_bytes(self, fmt)

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


@cache
def _planes(layout: KVLayout, fmt: Format) -> dict[str, Plane]:
    recipe, size, tokens = RECIPES[fmt], layout.head_size, layout.block_size
    sides = {"key": recipe.key, "value": recipe.value}
    widths = {
        name: (tokens * (size + size % 2 if codec.encoding is Encoding.UINT4 else size), codec.encoding)
        for name, codec in sides.items()
    }
    for name, codec in sides.items():
        if codec.group is not None:
            num_groups = tokens if codec.group is Group.TOKEN else size
            widths[f"{name}_scale"] = num_groups, Encoding.FLOAT16
            if codec.has_minimum:
                widths[f"{name}_minimum"] = num_groups, Encoding.FLOAT16
    planes, offset = {}, 0
    for name, (width, encoding) in widths.items():
        num_bytes = layout.num_kv_heads * width * _element_bits(layout, encoding) // 8
        planes[name] = Plane(name, layout.num_kv_heads, width, encoding, offset, num_bytes)
        offset += _aligned(num_bytes)
    return planes


@cache
def _block_bytes(layout: KVLayout, fmt: Format) -> int:
    last = list(_planes(layout, fmt).values())[-1]
    return last.offset + _aligned(last.num_bytes)


def _element_bits(layout: KVLayout, encoding: Encoding) -> int:
    match encoding:
        case Encoding.NATIVE:
            return 8 * layout.element_bytes
        case Encoding.UINT8 | Encoding.FLOAT8:
            return 8
        case Encoding.UINT4:
            return 4
        case Encoding.FLOAT16:
            return 16


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
