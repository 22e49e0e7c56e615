"""What a launch computes, cut into units of work that any thread may take.

    query tokens of a row    tiles: one token (a decode), or as many as fill 96 rows of a product (a prefill chunk)
    KV heads                 one a unit for a prefill tile; all in one for a decode, whose blocks are then read in order
    context                  splits of 256 tokens, at multiples of 256

A query's state is computed anew for each split and then merged in order of the splits, always. So where tiles end,
whether one unit walks through all splits or each has its own (flash-decoding), and which thread takes it, changes no
bit of the result. A tile is split where it would keep one thread busy while others have nothing left to do; then the
parts go to memory, and the thread that brings the last part of a tile merges them.
"""

from typing import cast

import numpy as np

from kernels.cpu.places import BAD_ROW
from kernels.cpu.runtime import compiled_short, inlined
from kernels.cpu.vector import load_int32, offset_of, record_at

SPLIT_TOKENS = 256
TILE_ROWS = 96  # rows of a prefill product (query tokens x query heads of a KV head): a multiple of 6 and of 12

_ADDRESSES = (
    "query", "out", "arena", "table", "context_lens", "cu_seqlens_q", "units", "scratch", "parts",
    "formats",  # kernels.cpu.places.FORMAT records by format code
    # Functions for the native dtype: of kernels.cpu.tiles, for tiles of native blocks, and of kernels.cpu.mixed, which
    # are 0 until they are needed.
    "decode_tile", "prefill_tile", "mixed_decode_tile", "mixed_prefill_tile",
)  # fmt: skip
_NUMBERS = (
    "query_stride", "out_stride",  # bytes from token to token
    "query_dtype", "out_dtype",  # kernels.cpu.rows.ACTIVATION_CODES
    "num_tokens", "num_rows", "table_width", "num_kv_heads", "group", "head_size", "block_size",
    "arena_bytes", "slab_bytes",
    "window",  # keys that a query sees, itself included; more than any context where there is no window
    "num_threads", "scratch_bytes",  # of one thread
    "unit_capacity", "part_floats",  # room at `units` and `parts`
    "num_units", "used_part_floats", "next_unit", "next_thread",
    "status", "culprit",  # kernels.cpu.places, and the entry or row that it is about
)  # fmt: skip
LAUNCH = np.dtype(
    [(name, np.int64) for name in (*_ADDRESSES, *_NUMBERS)] + [(name, np.float32) for name in ("query_scale", "cap")],
    align=True,
)
launch_at = record_at(LAUNCH)
NEXT_UNIT, NEXT_THREAD = offset_of(LAUNCH, "next_unit"), offset_of(LAUNCH, "next_thread")

UNIT = np.dtype(
    [
        ("part", np.int64),  # address of its part of the context, where it is split: see `part_floats`
        ("pending", np.int64),  # in a tile's first unit: parts that are still to come
        ("row", np.int64),
        ("query_begin", np.int64),  # token of the row's chunk
        ("query_count", np.int64),
        ("head_begin", np.int64),  # KV head
        ("head_count", np.int64),
        ("split_begin", np.int64),
        ("split_end", np.int64),
        ("first_unit", np.int64),  # of the tile's parts; they follow one another
        ("num_parts", np.int64),  # 1: the unit computes the whole context
    ],
    align=True,
)
unit_at = record_at(UNIT)
PENDING, UNIT_BYTES = offset_of(UNIT, "pending"), UNIT.itemsize

# A decode becomes parts when it is more than 1/16 of what a thread has to do; parts go by head when they still are
# more than 1/4 (their blocks are then read in strides). A prefill tile becomes parts from 1/2 on: its parts are large.
_DECODE_SHARE, _HEAD_SHARE, _PREFILL_SHARE = 16, 4, 2
_SERIAL_WORK = 1 << 19  # multiplications; below, waking other threads takes longer than they save
_ZERO = cast(int, np.int64(0))  # not a literal, which would make variants of its own
_DECODE_COST = 6  # a decode waits for memory: it costs as much as this many rows of a product


@inlined
def first_key(position: int, window: int) -> int:
    """Return the first key that the query at a position sees."""
    return max(0, position - window + 1)


@inlined
def query_len_of(address: int, row: int) -> int:
    """Return how many query tokens a row of the launch has."""
    begins = launch_at(address).cu_seqlens_q
    query_len: int = load_int32(begins, row + 1) - load_int32(begins, row)
    return query_len


@inlined
def tile_keys(address: int, row: int, query_begin: int, query_count: int) -> tuple[int, int]:
    """Return the keys, first and end, that a tile of queries sees."""
    launch = launch_at(address)
    position = load_int32(launch.context_lens, row) - query_len_of(address, row) + query_begin
    return first_key(position, launch.window), position + query_count


@inlined
def _tile_queries(address: int, query_len: int) -> int:
    """Return how many query tokens make a tile of a chunk."""
    return 1 if query_len == 1 else max(1, TILE_ROWS // launch_at(address).group)


@inlined
def _tile_cost(address: int, row: int, query_begin: int, query_count: int) -> int:
    """Return the work of a tile over all heads, in products of a row by a key."""
    launch = launch_at(address)
    first, end = tile_keys(address, row, query_begin, query_count)
    cost: int = (end - first) * max(query_count * launch.group, _DECODE_COST) * launch.num_kv_heads
    return cost


@compiled_short
def plan_launch(
    address: int, num_tokens: int,
    query: int, query_stride: int, query_dtype: int, out: int, out_stride: int, out_dtype: int,
    arena: int, arena_bytes: int, table: int, table_width: int, context_lens: int, cu_seqlens_q: int, num_rows: int,
    num_threads: int, scratch: int, units: int, unit_capacity: int, parts: int, part_floats: int,
) -> tuple[int, int]:  # fmt: skip
    """Fill in the launch record at an address, write its units; return how many they are, and for how many threads.

    Where units are more than there is room for, nothing is to be run: the caller makes room and plans again. What all
    launches of a model have in common is in the record already.
    """
    launch = launch_at(address)
    launch.num_tokens, launch.query, launch.query_stride = num_tokens, query, query_stride
    launch.query_dtype = query_dtype
    launch.out, launch.out_stride, launch.out_dtype = out, out_stride, out_dtype
    launch.arena, launch.arena_bytes, launch.table, launch.table_width = arena, arena_bytes, table, table_width
    launch.context_lens, launch.cu_seqlens_q, launch.num_rows = context_lens, cu_seqlens_q, num_rows
    launch.num_threads, launch.next_unit, launch.next_thread, launch.status = num_threads, 0, 0, 0
    launch.scratch, launch.units, launch.unit_capacity = scratch, units, unit_capacity
    launch.parts, launch.part_floats = parts, part_floats
    if _rows_are_sound(address):
        _plan_units(address)
    return launch.num_units, launch.num_threads


@inlined
def _rows_are_sound(address: int) -> bool:
    """Return whether no row leads outside the tensors; if not, the launch has no units, and its status says why."""
    launch = launch_at(address)
    launch.num_units = 0
    for row in range(launch.num_rows):
        begin, context_len = load_int32(launch.cu_seqlens_q, row), load_int32(launch.context_lens, row)
        query_len = query_len_of(address, row)
        in_tokens = begin >= 0 and query_len >= 0 and begin + query_len <= launch.num_tokens
        if not in_tokens or query_len > context_len or context_len > launch.table_width * launch.block_size:
            launch.status, launch.culprit = BAD_ROW, row
            return False
    return True


@inlined
def _plan_units(address: int) -> None:
    """Write the units of all rows, prefill tiles first."""
    launch = launch_at(address)
    total = _ZERO
    for row in range(launch.num_rows):
        query_len = query_len_of(address, row)
        tile = _tile_queries(address, query_len)
        for begin in range(0, query_len, tile):
            total += _tile_cost(address, row, begin, min(tile, query_len - begin))
    if total * launch.head_size < _SERIAL_WORK:
        launch.num_threads = 1
    launch.used_part_floats = 0
    for kind in range(2):
        decodes = kind == 1
        for row in range(launch.num_rows):
            query_len = query_len_of(address, row)
            if query_len > 0 and (query_len == 1) == decodes:
                tile = _tile_queries(address, query_len)
                for i in range((query_len + tile - 1) // tile - 1, -1, -1):  # the longest contexts first
                    _plan_tile(address, row, i * tile, min(tile, query_len - i * tile), decodes, total)


@inlined
def _plan_tile(address: int, row: int, begin: int, count: int, is_decode: bool, total: int) -> None:
    """Add the units of a tile to the launch, whose whole work is `total`."""
    launch = launch_at(address)
    first, end = tile_keys(address, row, begin, count)
    cost, heads = _tile_cost(address, row, begin, count), launch.num_kv_heads
    split_begin, split_end = first // SPLIT_TOKENS, (end + SPLIT_TOKENS - 1) // SPLIT_TOKENS
    num_splits = split_end - split_begin
    heads_a_unit = 1
    if is_decode:
        in_parts = cost * _DECODE_SHARE * launch.num_threads > total
        part_cost = cost // num_splits if in_parts else cost
        if part_cost * _HEAD_SHARE * launch.num_threads <= total:
            heads_a_unit = heads
    else:
        in_parts = cost // heads * _PREFILL_SHARE * launch.num_threads > total
    floats = heads_a_unit * count * launch.group * (launch.head_size + 2)
    needed = heads // heads_a_unit * num_splits * floats
    if num_splits == 1 or launch.num_threads == 1 or launch.used_part_floats + needed > launch.part_floats:
        in_parts = False
    num_parts = num_splits if in_parts else 1
    for head in range(0, heads, heads_a_unit):
        first_unit = launch.num_units
        for i in range(num_parts):
            if launch.num_units < launch.unit_capacity:
                unit = unit_at(launch.units + launch.num_units * UNIT_BYTES)
                unit.row, unit.query_begin, unit.query_count = row, begin, count
                unit.head_begin, unit.head_count = head, heads_a_unit
                unit.split_begin = split_begin + i
                unit.split_end = split_begin + i + 1 if in_parts else split_end
                unit.first_unit, unit.num_parts, unit.pending = first_unit, num_parts, num_parts
                unit.part = launch.parts + 4 * launch.used_part_floats
            launch.num_units += 1
            if in_parts:
                launch.used_part_floats += floats
