"""Making blocks narrower: `Backend.requantize_blocks`, whose formula `kernels.quantize` has in plain torch.

One head of a block at a time becomes float32 in a thread's scratch memory, keys in panels of 16 tokens, values as rows,
and from there codes. Lanes are tokens for keys, channels for values.
"""

from typing import Any

import numpy as np

from kernels.cpu.blocks import copy_bytes
from kernels.cpu.codes import are_floats, codes_in_byte, levels, not_above, rounded, sound, store_codes
from kernels.cpu.dequantize import read_keys, read_value_codes
from kernels.cpu.places import (
    FLOAT8_TOKEN,
    NATIVE,
    UINT4_TOKEN,
    UINT8_TOKEN,
    entry_offset,
    format_at,
    format_of_entry,
)
from kernels.cpu.runtime import inlined
from kernels.cpu.vector import (
    FLOAT8,
    FLOAT16,
    FLOAT32,
    LANES,
    UINT4,
    UINT8,
    divide,
    fetch_and_add,
    fma,
    inside,
    item_bytes,
    largest_lane,
    load,
    load_int32,
    load_scalar,
    maximum,
    minimum,
    offset_of,
    record_at,
    smallest_lane,
    splat,
    store,
    subtract,
)
from kernels.quantize import LARGEST_FLOAT16

REQUANTIZE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "arena", "sources", "targets", "formats", "scratch",  # addresses
            "num_layers", "arena_bytes", "slab_bytes", "num_entries", "num_heads", "head_size", "block_size",
            "scratch_bytes",  # of one thread
            "next_item", "next_thread",
        )
    ],
    align=True,
)  # fmt: skip
job_at = record_at(REQUANTIZE)
_NEXT_ITEM, _NEXT_THREAD = offset_of(REQUANTIZE, "next_item"), offset_of(REQUANTIZE, "next_thread")

_PANEL = 4 * LANES
_ZERO, _FAR, _SIXTEEN = np.float32(0), np.float32(LARGEST_FLOAT16), np.float32(16)
_LEAST_SCALE = np.float32(2.0**-24)  # float16's smallest number; a scale below is 0, and what it divides too


def scratch_bytes(head_size: int, block_size: int) -> int:
    """Return the bytes of scratch memory that a thread needs."""
    elements = head_size * max(block_size, LANES)
    return 4 * (elements + LANES) + 4 * 2 * LANES  # rows are read 16 channels at a time; scales and minimums


def requantize_items(address: int, tag: Any) -> None:
    """Take blocks of single layers from the REQUANTIZE record at an address until none is left."""
    job = job_at(address)
    scratch = job.scratch + fetch_and_add(address + _NEXT_THREAD, 1) * job.scratch_bytes
    while True:
        item = fetch_and_add(address + _NEXT_ITEM, 1)
        if item >= job.num_layers * job.num_entries:
            break
        layer_arena = job.arena + item // job.num_entries * job.arena_bytes
        source_entry = load_int32(job.sources, item % job.num_entries)
        target_entry = load_int32(job.targets, item % job.num_entries)
        source = layer_arena + entry_offset(source_entry, job.formats, job.slab_bytes)
        target = layer_arena + entry_offset(target_entry, job.formats, job.slab_bytes)
        source_record = format_of_entry(job.formats, source_entry)
        target_record = format_of_entry(job.formats, target_entry)
        _narrow_keys(address, scratch, source, source_record, target, target_record, tag)
        _narrow_values(address, scratch, source, source_record, target, target_record, tag)


# ---- keys


@inlined
def _narrow_keys(
    address: int, scratch: int, source: int, source_record: int, target: int, target_record: int, tag: Any
) -> None:
    job, old, new = job_at(address), format_at(source_record), format_at(target_record)
    size, block_size = job.head_size, job.block_size
    if old.key_kind == new.key_kind:  # int8
        numbers = 2 * job.num_heads * block_size
        copy_bytes(source, target, job.num_heads * size * block_size)
        copy_bytes(source + old.key_scale, target + new.key_scale, numbers)
        copy_bytes(source + old.key_minimum, target + new.key_minimum, numbers)
        return
    for h in range(job.num_heads):
        read_keys(source, source_record, h, size, block_size, scratch, 0, tag)
        if new.key_kind == UINT8_TOKEN:
            _quantize_token_keys(scratch, h, size, block_size, target, target_record, UINT8)
        elif new.key_kind == FLOAT8_TOKEN:
            _quantize_token_keys(scratch, h, size, block_size, target, target_record, FLOAT8)
        else:
            _quantize_channel_keys(scratch, h, size, block_size, target, target_record)


@inlined
def _quantize_token_keys(
    panels: int, head: int, size: int, block_size: int, target: int, record: int, tag: Any
) -> None:
    form, codes = format_at(record), target + head * size * block_size
    for t in range(0, block_size, LANES):
        panel, count = panels + 4 * size * t, min(LANES, block_size)
        low = sound(load(panel, FLOAT32))
        high = low
        for d in range(1, size):
            x = sound(load(panel + _PANEL * d, FLOAT32))
            low, high = minimum(low, x), maximum(high, x)
        begin, scale = _begin_and_scale(low, high, splat(_ZERO), splat(levels(tag)), tag)
        numbers = panels + 4 * size * max(block_size, LANES)
        _write_numbers(scale, numbers, target + form.key_scale + 2 * (head * block_size + t), count)
        if form.key_minimum > 0:
            _write_numbers(begin, numbers, target + form.key_minimum + 2 * (head * block_size + t), count)
        for d in range(size):
            x = sound(load(panel + _PANEL * d, FLOAT32))
            _write_codes(codes + d * block_size + t, _steps(x, begin, scale), count, tag)


@inlined
def _quantize_channel_keys(panels: int, head: int, size: int, block_size: int, target: int, record: int) -> None:
    form, half = format_at(record), size // 2
    codes = target + head * half * block_size
    for d in range(half):
        low_begin, low_scale = _channel_numbers(panels + _PANEL * d, size, block_size)
        high_begin, high_scale = _channel_numbers(panels + _PANEL * (d + half), size, block_size)
        number = 2 * (head * size + d)
        store(target + form.key_scale + number, low_scale, FLOAT16)
        store(target + form.key_minimum + number, low_begin, FLOAT16)
        store(target + form.key_scale + number + 2 * half, high_scale, FLOAT16)
        store(target + form.key_minimum + number + 2 * half, high_begin, FLOAT16)
        for t in range(0, block_size, LANES):
            panel = panels + 4 * size * t + _PANEL * d
            low = _steps(sound(load(panel, FLOAT32)), splat(low_begin), splat(low_scale))
            high = _steps(sound(load(panel + _PANEL * half, FLOAT32)), splat(high_begin), splat(high_scale))
            _write_pairs(codes + d * block_size + t, low, high, min(LANES, block_size))


@inlined
def _channel_numbers(line: int, size: int, block_size: int) -> tuple[float, float]:
    """Return minimum and scale of a channel's keys: 16 tokens' at an address, the next ones' in the next panel."""
    low, high = splat(_FAR), splat(-_FAR)
    for t in range(0, block_size, LANES):
        x = sound(load(line + 4 * size * t, FLOAT32))
        low = minimum(low, inside(x, np.int32(0), np.int32(block_size), _FAR))
        high = maximum(high, inside(x, np.int32(0), np.int32(block_size), -_FAR))
    begin, scale = _begin_and_scale(smallest_lane(low), largest_lane(high), _ZERO, levels(UINT4), UINT4)
    return begin, scale


# ---- values


@inlined
def _narrow_values(
    address: int, scratch: int, source: int, source_record: int, target: int, target_record: int, tag: Any
) -> None:
    job, old, new = job_at(address), format_at(source_record), format_at(target_record)
    size, block_size, item = job.head_size, job.block_size, item_bytes(tag)
    if old.value_kind == new.value_kind:  # int4
        numbers = 2 * job.num_heads * block_size
        copy_bytes(source + old.value, target + new.value, job.num_heads * size * block_size // 2)
        copy_bytes(source + old.value_scale, target + new.value_scale, numbers)
        copy_bytes(source + old.value_minimum, target + new.value_minimum, numbers)
        return
    for h in range(job.num_heads):
        if old.value_kind == NATIVE:
            values = source + old.value + h * block_size * size * item
            for i in range(0, block_size * size, LANES):
                store(scratch + 4 * i, load(values + item * i, tag), FLOAT32)
        else:
            read_value_codes(source, source_record, h, size, block_size, scratch, 4 * size, 4)
        if new.value_kind == UINT8_TOKEN:
            _quantize_values(scratch, h, size, block_size, target, target_record, UINT8)
        elif new.value_kind == FLOAT8_TOKEN:
            _quantize_values(scratch, h, size, block_size, target, target_record, FLOAT8)
        elif new.value_kind == UINT4_TOKEN:
            _quantize_values(scratch, h, size, block_size, target, target_record, UINT4)


@inlined
def _quantize_values(rows: int, head: int, size: int, block_size: int, target: int, record: int, tag: Any) -> None:
    form, half, width = format_at(record), size // 2, size // codes_in_byte(tag)
    for t in range(block_size):
        row = rows + 4 * size * t
        low = sound(load(row, FLOAT32))
        high = low
        for d in range(LANES, size, LANES):
            x = sound(load(row + 4 * d, FLOAT32))
            low, high = minimum(low, x), maximum(high, x)
        begin, scale = _begin_and_scale(smallest_lane(low), largest_lane(high), _ZERO, levels(tag), tag)
        store(target + form.value_scale + 2 * (head * block_size + t), scale, FLOAT16)
        if form.value_minimum > 0:
            store(target + form.value_minimum + 2 * (head * block_size + t), begin, FLOAT16)
        codes = target + form.value + (head * block_size + t) * width
        if codes_in_byte(tag) == 1:
            for d in range(0, size, LANES):
                x = sound(load(row + 4 * d, FLOAT32))
                _write_codes(codes + d, _steps(x, splat(begin), splat(scale)), LANES, tag)
        else:
            lanes = LANES if half % LANES == 0 else LANES // 2
            for d in range(0, half, lanes):
                lower = _steps(sound(load(row + 4 * d, FLOAT32)), splat(begin), splat(scale))
                upper = _steps(sound(load(row + 4 * (half + d), FLOAT32)), splat(begin), splat(scale))
                _write_pairs(codes + d, lower, upper, lanes)


# ---- the formula


@inlined
def _begin_and_scale(low: Any, high: Any, zero: Any, largest: Any, tag: Any) -> Any:
    """Return minimum and scale of groups from their lowest and highest number; all vectors, or all single floats."""
    if are_floats(tag):
        begin, span = zero, maximum(high, subtract(zero, low))
    else:
        begin = not_above(low)
        span = subtract(high, begin)
    return begin, subtract(zero, not_above(subtract(zero, divide(span, largest))))


@inlined
def _steps(x: Any, begin: Any, scale: Any) -> Any:
    """Return (x - minimum) / scale, 0 where the scale is 0: x is the minimum then."""
    return divide(subtract(x, begin), maximum(scale, splat(_LEAST_SCALE)))


@inlined
def _write_codes(address: int, steps: Any, count: int, tag: Any) -> None:
    """Write 8 or 16 codes. No step lies above the largest: scales are rounded up."""
    codes = steps if are_floats(tag) else rounded(steps)
    if count == LANES:
        store_codes(address, codes, tag, 16)
    else:
        store_codes(address, codes, tag, 8)


@inlined
def _write_pairs(address: int, lower: Any, upper: Any, count: int) -> None:
    """Write 8 or 16 pairs of codes."""
    _write_codes(address, fma(rounded(upper), splat(_SIXTEEN), rounded(lower)), count, UINT8)


@inlined
def _write_numbers(numbers: Any, scratch: int, target: int, count: int) -> None:
    """Write the first lanes of a vector as float16."""
    store(scratch, numbers, FLOAT32)
    for i in range(count):
        store(target + 2 * i, load_scalar(scratch + 4 * i, FLOAT32), FLOAT16)
