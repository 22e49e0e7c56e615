"""Queries of a unit against one tile of 64 keys whose blocks may have any format, in any order.

A decode multiplies codes where they lie, and scales around the products:

    scales by token      score = scale * (q . codes) + minimum * sum(q)        (keys)
                         out += sum of (p * scale) * codes + sum of p * minimum       (values)
    scales by channel    score = (q * scales) . codes + q . minimums           (keys)

where q * scales is made anew for each block. Which of them a block needs is a branch a block: that costs nothing here,
where each block is a product of its own and nothing is pipelined over blocks. A prefill tile has rows enough to pay for
float32 copies, in which numbers are what codes stand for; so its last bits are not a decode's.
"""

from typing import Any

import numpy as np

from kernels.cpu.code_product import WIDE_CODE_ROWS, key_product, value_product
from kernels.cpu.codes import codes_in_byte
from kernels.cpu.dequantize import read_keys, read_value_codes
from kernels.cpu.places import FLOAT8_TOKEN, NATIVE, UINT4_CHANNEL, UINT8_TOKEN, format_at, format_of_entry
from kernels.cpu.plan import first_key, launch_at
from kernels.cpu.product import prefetch
from kernels.cpu.runtime import inlined
from kernels.cpu.softmax import TILE_TOKENS, softmax_tile
from kernels.cpu.tiles import (
    AFRESH,
    LINE_BYTES,
    ON_TOP,
    PANEL,
    block_at,
    block_outputs,
    block_scores,
    chunk_ahead,
    copy_values,
    entry_at,
    multiply_panels,
    thread_at,
)
from kernels.cpu.vector import (
    FLOAT8,
    FLOAT16,
    FLOAT32,
    LANES,
    UINT4,
    UINT8,
    add,
    fma,
    item_bytes,
    load,
    load_scalar,
    multiply,
    splat,
    store,
    sum_of_lanes,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
_ROW = 4 * TILE_TOKENS  # bytes of a row of scores, and of scales


# ---- decode


def mixed_decode_tile(launch_address: int, thread: int, tag: Any) -> None:
    """Bring a tile of keys into the state of a single query token's rows, block by block, where the blocks lie."""
    launch, own = launch_at(launch_address), thread_at(thread)
    first_block, end_block = own.first // launch.block_size, (own.end - 1) // launch.block_size + 1
    if not own.has_sums:
        _sum_queries(launch_address, thread)
    for b in range(first_block, end_block):
        _scores(launch_address, thread, b, b + 1 < end_block, tag)
    for h in range(own.head_count):
        _read_scales(launch_address, thread, own.head_begin + h)
        _scaled_softmax_rows(launch_address, thread, h * launch.group)
    for b in range(first_block, end_block):
        _outputs(launch_address, thread, b, b + 1 < end_block, tag)


@inlined
def _scores(launch_address: int, thread: int, b: int, keys_follow: bool, tag: Any) -> None:
    """Multiply the queries of all the unit's heads by a block's keys."""
    kind = format_at(_record(launch_address, thread, b)).key_kind
    if kind == NATIVE:
        block_scores(launch_address, thread, b, keys_follow, tag)
    elif kind == UINT8_TOKEN:
        _code_scores(launch_address, thread, b, keys_follow, UINT8)
    elif kind == FLOAT8_TOKEN:
        _code_scores(launch_address, thread, b, keys_follow, FLOAT8)
    else:
        _code_scores(launch_address, thread, b, keys_follow, UINT4)


@inlined
def _outputs(launch_address: int, thread: int, b: int, values_follow: bool, tag: Any) -> None:
    """Add a block's values, times their probabilities, to the state of all the unit's heads."""
    kind = format_at(_record(launch_address, thread, b)).value_kind
    if kind == NATIVE:
        block_outputs(launch_address, thread, b, values_follow, tag)
    elif kind == UINT8_TOKEN:
        _code_outputs(launch_address, thread, b, values_follow, UINT8)
    elif kind == FLOAT8_TOKEN:
        _code_outputs(launch_address, thread, b, values_follow, FLOAT8)
    else:
        _code_outputs(launch_address, thread, b, values_follow, UINT4)


@inlined
def _record(launch_address: int, thread: int, b: int) -> int:
    """Return the address of the format of one of the row's blocks."""
    entry = entry_at(launch_address, thread_at(thread).row, b)
    record: int = format_of_entry(launch_at(launch_address).formats, entry)
    return record


@inlined
def _sum_queries(launch_address: int, thread: int) -> None:
    """Sum each row's query over its channels."""
    launch, own = launch_at(launch_address), thread_at(thread)
    for r in range(own.head_count * launch.group):
        total = splat(_ZERO)
        for d in range(0, launch.head_size, LANES):
            total = add(total, load(own.query + 4 * (launch.head_size * r + d), FLOAT32))
        store(own.sums + 4 * r, sum_of_lanes(total), FLOAT32)
    own.has_sums = 1


@inlined
def _code_scores(launch_address: int, thread: int, b: int, keys_follow: bool, tag: Any) -> None:
    """Multiply the queries of all the unit's heads by a block's key codes; codes by channel get their scales here."""
    launch, own = launch_at(launch_address), thread_at(thread)
    size, block_size, group, heads = launch.head_size, launch.block_size, launch.group, own.head_count
    plane, half = block_size * size // codes_in_byte(tag), size // 2
    upper = half * block_size if codes_in_byte(tag) == 1 else 0
    record = _record(launch_address, thread, b)
    block = block_at(launch_address, own.row, b)
    keys = block + own.head_begin * plane
    if keys_follow:
        following = block_at(launch_address, own.row, b + 1) + own.head_begin * plane
    else:
        first = own.first // block_size
        form = format_at(_record(launch_address, thread, first))
        following = block_at(launch_address, own.row, first) + form.value + own.head_begin * plane
    _ask_for_scales(launch_address, thread, min(b + 1, launch.table_width - 1))
    lanes = min(LANES, block_size)
    for h in range(heads):
        chunk, scores = keys + h * plane, own.scores + _ROW * h * group + 4 * (b * block_size - own.begin)
        ahead = chunk_ahead(chunk, h, heads, plane, following)
        query = own.query + 4 * size * h * group
        if codes_in_byte(tag) == 2:
            _fold_scales(launch_address, thread, block, record, own.head_begin + h, query, scores)
            query = own.folded
        for t in range(0, block_size, lanes):
            key_product(
                group, lanes, scores + 4 * t, _ROW, query, 4 * size, chunk + t, block_size, half,
                ON_TOP if codes_in_byte(tag) == 2 else AFRESH, upper, ahead + t * plane // block_size,
                lanes * 2 // codes_in_byte(tag), tag,
            )  # fmt: skip


@inlined
def _ask_for_scales(launch_address: int, thread: int, b: int) -> None:
    """Ask for a block's scales to be brought near; where there is no such block, what is asked for is not used."""
    form, block = format_at(_record(launch_address, thread, b)), block_at(launch_address, thread_at(thread).row, b)
    if form.key_kind != NATIVE:
        for i in range(form.key_scale, form.block_bytes, LINE_BYTES):
            prefetch(block + i)


@inlined
def _fold_scales(launch_address: int, thread: int, block: int, record: int, head: int, query: int, scores: int) -> None:
    """Multiply a head's queries by a block's scales by channel, and begin their scores with those of the minimums."""
    launch, own = launch_at(launch_address), thread_at(thread)
    size, form = launch.head_size, format_at(record)
    scales, minimums = block + form.key_scale + 2 * size * head, block + form.key_minimum + 2 * size * head
    for g in range(launch.group):
        total = splat(_ZERO)
        for d in range(0, size, LANES):
            q = load(query + 4 * (size * g + d), FLOAT32)
            store(own.folded + 4 * (size * g + d), multiply(q, load(scales + 2 * d, FLOAT16)), FLOAT32)
            total = fma(q, load(minimums + 2 * d, FLOAT16), total)
        begin = sum_of_lanes(total)
        if launch.block_size % LANES == 0:
            for t in range(0, launch.block_size, LANES):
                store(scores + _ROW * g + 4 * t, splat(begin), FLOAT32)
        else:
            for t in range(launch.block_size):
                store(scores + _ROW * g + 4 * t, begin, FLOAT32)


@inlined
def _code_outputs(launch_address: int, thread: int, b: int, values_follow: bool, tag: Any) -> None:
    """Add a block's value codes, times their scaled probabilities, to the state of all the unit's heads."""
    launch, own = launch_at(launch_address), thread_at(thread)
    size, block_size, group, heads = launch.head_size, launch.block_size, launch.group, own.head_count
    width, half = size // codes_in_byte(tag), size // 2
    plane, upper = block_size * width, half if codes_in_byte(tag) == 1 else 0
    form = format_at(_record(launch_address, thread, b))
    values = block_at(launch_address, own.row, b) + form.value + own.head_begin * plane
    following = block_at(launch_address, own.row, min(b + 1, launch.table_width - 1)) + own.head_begin * plane
    following += form.value if values_follow else 0
    lanes = LANES if half % LANES == 0 else LANES // 2
    if group <= WIDE_CODE_ROWS and half % (2 * LANES) == 0:
        lanes = 2 * LANES
    for h in range(heads):
        chunk, outs = values + h * plane, own.out + 4 * size * h * group
        ahead = chunk_ahead(chunk, h, heads, plane, following)
        scores = own.scores + _ROW * h * group + 4 * (b * block_size - own.begin)
        for d in range(0, half, lanes):
            value_product(
                group, lanes, outs + 4 * d, 4 * size, scores, _ROW, chunk + d, width, block_size, half, upper,
                ahead + d * block_size * 2 // codes_in_byte(tag), lanes * 2 // codes_in_byte(tag), tag,
            )  # fmt: skip


@inlined
def _read_scales(launch_address: int, thread: int, head: int) -> None:
    """Read what one head's scores and probabilities are to be scaled by, for each token of the tile."""
    launch, own = launch_at(launch_address), thread_at(thread)
    block_size = launch.block_size
    for i in range(0, _ROW, 4 * LANES):
        for row in range(4):
            store(own.scales + _ROW * row + i, splat(_ONE if row % 2 == 0 else _ZERO), FLOAT32)
    for b in range(own.first // block_size, (own.end - 1) // block_size + 1):
        form, block = format_at(_record(launch_address, thread, b)), block_at(launch_address, own.row, b)
        target, numbers = own.scales + 4 * (b * block_size - own.begin), 2 * block_size * head
        if form.key_kind != NATIVE and form.key_kind != UINT4_CHANNEL:
            _read_numbers(block + form.key_scale + numbers, target, block_size, form.key_factor)
            if form.key_minimum > 0:
                _read_numbers(block + form.key_minimum + numbers, target + _ROW, block_size, _ONE)
        if form.value_kind != NATIVE:
            _read_numbers(block + form.value_scale + numbers, target + 2 * _ROW, block_size, form.value_factor)
            if form.value_minimum > 0:
                _read_numbers(block + form.value_minimum + numbers, target + 3 * _ROW, block_size, _ONE)


@inlined
def _read_numbers(source: int, target: int, count: int, factor: Any) -> None:
    """Read 8 float16, or a multiple of 16, to float32, times a factor."""
    if count % LANES == 0:
        for t in range(0, count, LANES):
            store(target + 4 * t, multiply(load(source + 2 * t, FLOAT16), splat(factor)), FLOAT32)
    else:
        for t in range(count):
            store(target + 4 * t, np.float32(load_scalar(source + 2 * t, FLOAT16) * factor), FLOAT32)


@inlined
def _scaled_softmax_rows(launch_address: int, thread: int, row_begin: int) -> None:
    """As tiles.softmax_rows for one token's rows, between the scales of keys and those of values."""
    launch, own = launch_at(launch_address), thread_at(thread)
    first, end = first_key(own.position, launch.window) - own.begin, own.position + 1 - own.begin
    for r in range(row_begin, row_begin + launch.group):
        scores, query_sum = own.scores + _ROW * r, splat(load_scalar(own.sums + 4 * r, FLOAT32))
        for i in range(0, _ROW, 4 * LANES):
            scaled = multiply(load(scores + i, FLOAT32), load(own.scales + i, FLOAT32))
            store(scores + i, fma(query_sum, load(own.scales + _ROW + i, FLOAT32), scaled), FLOAT32)
        top, total = own.top + 4 * r, own.total + 4 * r
        new_top, factor, added = softmax_tile(scores, first, end, launch.cap, load_scalar(top, FLOAT32))
        store(top, new_top, FLOAT32)
        store(total, np.float32(np.float32(load_scalar(total, FLOAT32) * factor) + added), FLOAT32)
        shift = splat(_ZERO)
        for i in range(0, _ROW, 4 * LANES):
            p = load(scores + i, FLOAT32)
            shift = fma(p, load(own.scales + 3 * _ROW + i, FLOAT32), shift)
            store(scores + i, multiply(p, load(own.scales + 2 * _ROW + i, FLOAT32)), FLOAT32)
        added_to_all = splat(sum_of_lanes(shift))
        out = own.out + 4 * launch.head_size * r
        for i in range(0, 4 * launch.head_size, 4 * LANES):
            store(out + i, fma(splat(factor), load(out + i, FLOAT32), added_to_all), FLOAT32)


# ---- prefill


def mixed_prefill_tile(launch_address: int, thread: int, tag: Any) -> None:
    """Bring a tile of keys into the state of many query tokens' rows of one head, by float32 copies."""
    launch, own = launch_at(launch_address), thread_at(thread)
    block_size, size = launch.block_size, launch.head_size
    for b in range(own.first // block_size, (own.end - 1) // block_size + 1):
        record = _record(launch_address, thread, b)
        block, begin = block_at(launch_address, own.row, b), b * block_size - own.begin
        read_keys(block, record, own.head_begin, size, block_size, own.keys, begin, tag)
        values = own.values + PANEL * begin
        if format_at(record).value_kind == NATIVE:  # whose tokens beyond the context may hold anything
            plane = block_size * size * item_bytes(tag)
            first, end = max(0, own.first - own.begin - begin), min(block_size, own.end - own.begin - begin)
            native = block + (launch.num_kv_heads + own.head_begin) * plane
            copy_values(native, own.values, begin, first, end, size, tag)
        else:
            read_value_codes(block, record, own.head_begin, size, block_size, values, PANEL, 4 * TILE_TOKENS)
    multiply_panels(launch_address, thread)
