"""Where blocks, and planes in them, lie in a layer's arena, for compiled code; `kernels.formats` says it for Python."""

import numpy as np
import numpy.typing as npt

from kernels.cpu.runtime import inlined
from kernels.cpu.vector import FLOAT8_FACTOR, record_at
from kernels.formats import ENTRY_FORMAT_BITS, FORMAT_MASK, PLACES_PER_SLAB, RECIPES, Encoding, Format, KVLayout

FINE, BAD_FORMAT, OUT_OF_ARENA, BAD_ROW, NOT_COMPILED = 0, 1, 2, 3, 4  # how a launch went

NUM_FORMATS = len(Format)
NATIVE, UINT8_TOKEN, FLOAT8_TOKEN, UINT4_TOKEN, UINT4_CHANNEL = 0, 1, 2, 3, 4  # codecs
_KINDS = {
    RECIPES[Format.NATIVE].key: NATIVE,
    RECIPES[Format.INT8].key: UINT8_TOKEN,
    RECIPES[Format.FP8].key: FLOAT8_TOKEN,
    RECIPES[Format.INT4].value: UINT4_TOKEN,
    RECIPES[Format.INT4].key: UINT4_CHANNEL,
}

# A format of a layout. Where planes begin is counted from the block's begin; 0 for one that it does not have (keys
# begin at 0). Factors are of scales: what codes are loaded as, times that, is the number that they encode.
FORMAT = np.dtype(
    [
        (name, np.int64)
        for name in (
            "block_bytes", "key_kind", "value_kind", "value", "key_scale", "key_minimum", "value_scale",
            "value_minimum",
        )
    ]
    + [("key_factor", np.float32), ("value_factor", np.float32)],
    align=True,
)  # fmt: skip
format_at = record_at(FORMAT)
FORMAT_BYTES = FORMAT.itemsize


def format_table(layout: KVLayout) -> npt.NDArray[np.void]:
    """Return the FORMAT records of a layout, by format code."""
    table = np.zeros(FORMAT_MASK + 1, FORMAT)  # codes that name no format have empty blocks
    for fmt in Format:
        recipe, planes = RECIPES[fmt], layout.planes(fmt)
        record = table[fmt]
        record["block_bytes"] = layout.block_bytes(fmt)
        record["key_kind"], record["value_kind"] = _KINDS[recipe.key], _KINDS[recipe.value]
        for name in ("value", "key_scale", "key_minimum", "value_scale", "value_minimum"):
            record[name] = planes[name].offset if name in planes else 0
        for name, codec in (("key_factor", recipe.key), ("value_factor", recipe.value)):
            record[name] = FLOAT8_FACTOR if codec.encoding is Encoding.FLOAT8 else 1.0
    return table


@inlined
def format_of_entry(formats: int, entry: int) -> int:
    """Return the address of the record of an entry's format."""
    return formats + (entry & FORMAT_MASK) * FORMAT_BYTES


@inlined
def block_offset(block_id: int, slab_bytes: int, block_bytes: int) -> int:
    """Return where a block begins, in bytes from the begin of the layer's arena."""
    return block_id // PLACES_PER_SLAB * slab_bytes + block_id % PLACES_PER_SLAB * block_bytes


@inlined
def entry_offset(entry: int, formats: int, slab_bytes: int) -> int:
    """Return where the block of an entry begins, in bytes from the begin of the layer's arena."""
    return block_offset(entry >> ENTRY_FORMAT_BITS, slab_bytes, format_at(format_of_entry(formats, entry)).block_bytes)


@inlined
def check_block(block_id: int, slab_bytes: int, block_bytes: int, arena_bytes: int) -> int:
    """Return FINE, or OUT_OF_ARENA where no such block lies in the arena."""
    beyond_slab = (block_id % PLACES_PER_SLAB + 1) * block_bytes > slab_bytes
    beyond_arena = block_offset(block_id, slab_bytes, block_bytes) + block_bytes > arena_bytes
    return OUT_OF_ARENA if block_id < 0 or beyond_slab or beyond_arena else FINE


@inlined
def check_entry(entry: int, formats: int, slab_bytes: int, arena_bytes: int) -> int:
    """Return FINE, BAD_FORMAT where the entry's code names no format, or OUT_OF_ARENA."""
    if entry & FORMAT_MASK >= NUM_FORMATS:
        return BAD_FORMAT
    block_bytes = format_at(format_of_entry(formats, entry)).block_bytes
    return check_block(entry >> ENTRY_FORMAT_BITS, slab_bytes, block_bytes, arena_bytes)
