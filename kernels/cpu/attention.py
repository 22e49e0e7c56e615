"""Attention of one unit of work, and the loop in which every thread takes units until none is left."""

import numpy as np

from kernels.cpu.places import NOT_COMPILED
from kernels.cpu.plan import NEXT_THREAD, NEXT_UNIT, PENDING, SPLIT_TOKENS, UNIT_BYTES, launch_at, tile_keys, unit_at
from kernels.cpu.rows import activation_bytes, read_scaled, write_divided
from kernels.cpu.runtime import inlined
from kernels.cpu.softmax import NO_TOP, TILE_TOKENS, merge
from kernels.cpu.tiles import entries_are_sound, lay_out, thread_at
from kernels.cpu.vector import FLOAT32, LANES, call, fetch_and_add, load_int32, load_scalar, splat, store


def run_units(launch_address: int) -> None:
    """Take units of a planned launch until none is left."""
    launch = launch_at(launch_address)
    thread = launch.scratch + fetch_and_add(launch_address + NEXT_THREAD, 1) * launch.scratch_bytes
    lay_out(thread, launch.num_kv_heads * launch.group, launch.head_size)
    while True:
        i = fetch_and_add(launch_address + NEXT_UNIT, 1)
        if i >= launch.num_units:
            break
        unit = launch.units + i * UNIT_BYTES
        if _compute_splits(launch_address, unit, thread):
            _finish(launch_address, unit, thread)


@inlined
def _compute_splits(launch_address: int, unit_address: int, thread: int) -> bool:
    """Bring a unit's splits of the context into its queries' state. Returns whether all its entries were sound."""
    launch, unit, own = launch_at(launch_address), unit_at(unit_address), thread_at(thread)
    first, end = tile_keys(launch_address, unit.row, unit.query_begin, unit.query_count)
    rows, size = unit.head_count * unit.query_count * launch.group, launch.head_size
    own.row, own.head_begin, own.head_count = unit.row, unit.head_begin, unit.head_count
    own.query_count, own.position = unit.query_count, end - unit.query_count
    own.has_sums = 0
    _read_queries(launch_address, unit_address, thread)
    _clear(own.merged_out, own.merged_top, own.merged_total, rows, size)
    for split in range(unit.split_begin, unit.split_end):
        _clear(own.out, own.top, own.total, rows, size)
        split_first, split_end = max(first, split * SPLIT_TOKENS), min(end, (split + 1) * SPLIT_TOKENS)
        for begin in range(split_first // TILE_TOKENS * TILE_TOKENS, split_end, TILE_TOKENS):
            own.begin, own.first, own.end = begin, max(split_first, begin), min(split_end, begin + TILE_TOKENS)
            if not entries_are_sound(launch_address, thread):
                return False
            if not own.is_native and launch.mixed_decode_tile == 0:
                launch.status = NOT_COMPILED
                return False
            if unit.query_count == 1:
                call(launch.decode_tile if own.is_native else launch.mixed_decode_tile, launch_address, thread)
            else:
                call(launch.prefill_tile if own.is_native else launch.mixed_prefill_tile, launch_address, thread)
        if unit.num_parts == 1:
            _merge_rows(thread, own.out, own.top, own.total, rows, size)
    return True


@inlined
def _finish(launch_address: int, unit_address: int, thread: int) -> None:
    """Write a unit's output; where it is one part of several, keep it, and let the last part write for all of them."""
    launch, unit, own = launch_at(launch_address), unit_at(unit_address), thread_at(thread)
    rows, size = unit.head_count * unit.query_count * launch.group, launch.head_size
    if unit.num_parts > 1:
        wide, narrow = 4 * rows * size, 4 * rows
        _copy(own.out, unit.part, wide)
        _copy(own.top, unit.part + wide, narrow)
        _copy(own.total, unit.part + wide + narrow, narrow)
        first_unit = launch.units + unit.first_unit * UNIT_BYTES
        if fetch_and_add(first_unit + PENDING, -1) > 1:
            return
        for i in range(unit.num_parts):
            part = unit_at(first_unit + i * UNIT_BYTES).part
            _merge_rows(thread, part, part + wide, part + wide + narrow, rows, size)
    _write_rows(launch_address, unit_address, thread)


@inlined
def _read_queries(launch_address: int, unit_address: int, thread: int) -> None:
    """Read a unit's queries, in the order of its rows, scaled."""
    launch, unit = launch_at(launch_address), unit_at(unit_address)
    size, item = launch.head_size, activation_bytes(launch.query_dtype)
    first_token = load_int32(launch.cu_seqlens_q, unit.row) + unit.query_begin
    row = thread_at(thread).query
    for h in range(unit.head_begin, unit.head_begin + unit.head_count):
        for i in range(unit.query_count):
            token = launch.query + (first_token + i) * launch.query_stride
            for g in range(launch.group):
                source = token + (h * launch.group + g) * size * item
                read_scaled(source, launch.query_dtype, row, size, launch.query_scale)
                row += 4 * size


@inlined
def _write_rows(launch_address: int, unit_address: int, thread: int) -> None:
    """Write the output of a unit's queries from their merged state."""
    launch, unit, own = launch_at(launch_address), unit_at(unit_address), thread_at(thread)
    size, item = launch.head_size, activation_bytes(launch.out_dtype)
    first_token = load_int32(launch.cu_seqlens_q, unit.row) + unit.query_begin
    r = 0
    for h in range(unit.head_begin, unit.head_begin + unit.head_count):
        for i in range(unit.query_count):
            token = launch.out + (first_token + i) * launch.out_stride
            for g in range(launch.group):
                target = token + (h * launch.group + g) * size * item
                total = load_scalar(own.merged_total + 4 * r, FLOAT32)
                write_divided(own.merged_out + 4 * size * r, total, target, launch.out_dtype, size)
                r += 1


@inlined
def _clear(out: int, top: int, total: int, rows: int, size: int) -> None:
    """Make the state of rows that have seen no key. Rows that pad a product keep theirs, which nobody reads."""
    zeros = splat(np.float32(0))
    for i in range(0, 4 * rows * size, 4 * LANES):
        store(out + i, zeros, FLOAT32)
    for r in range(rows):
        store(top + 4 * r, NO_TOP, FLOAT32)
        store(total + 4 * r, np.float32(0), FLOAT32)


@inlined
def _merge_rows(thread: int, out: int, top: int, total: int, rows: int, size: int) -> None:
    """Merge a split's state of rows into that of the splits before it."""
    own = thread_at(thread)
    for r in range(rows):
        merged_top, merged_total = own.merged_top + 4 * r, own.merged_total + 4 * r
        new_top, new_total = merge(
            load_scalar(merged_top, FLOAT32), load_scalar(merged_total, FLOAT32), own.merged_out + 4 * size * r,
            load_scalar(top + 4 * r, FLOAT32), load_scalar(total + 4 * r, FLOAT32), out + 4 * size * r, size,
        )  # fmt: skip
        store(merged_top, new_top, FLOAT32)
        store(merged_total, new_total, FLOAT32)


@inlined
def _copy(source: int, target: int, num_bytes: int) -> None:
    """Copy float32 numbers."""
    for i in range(0, num_bytes, 4):
        store(target + i, load_scalar(source + i, FLOAT32), FLOAT32)
