"""One head of a block as float32: keys in panels of 16 tokens, values as rows of tokens or panels of 16 channels."""

from typing import Any

import numpy as np

from kernels.cpu.codes import codes_in_byte
from kernels.cpu.places import FLOAT8_TOKEN, NATIVE, UINT8_TOKEN, format_at
from kernels.cpu.runtime import inlined
from kernels.cpu.tiles import PANEL, copy_keys
from kernels.cpu.vector import (
    FLOAT8,
    FLOAT16,
    FLOAT32,
    LANES,
    UINT4,
    UINT8,
    fma,
    item_bytes,
    load,
    load_scalar,
    load_upper,
    load_upper_scalar,
    multiply,
    splat,
    store,
)

_ZERO = np.float32(0)


@inlined
def read_keys(
    block: int, record: int, head: int, size: int, block_size: int, panels: int, begin: int, tag: Any
) -> None:
    """Read the keys of a head to float32 panels of 16 tokens, the tile's token `begin` first."""
    kind = format_at(record).key_kind
    if kind == NATIVE:
        copy_keys(block + head * block_size * size * item_bytes(tag), panels, begin, size, block_size, tag)
    elif kind == UINT8_TOKEN:
        _read_token_keys(block, record, head, size, block_size, panels, begin, UINT8)
    elif kind == FLOAT8_TOKEN:
        _read_token_keys(block, record, head, size, block_size, panels, begin, FLOAT8)
    else:
        _read_channel_keys(block, record, head, size, block_size, panels, begin)


@inlined
def _read_token_keys(
    block: int, record: int, head: int, size: int, block_size: int, panels: int, begin: int, tag: Any
) -> None:
    form, codes, numbers = format_at(record), block + head * size * block_size, 2 * block_size * head
    scale_at, minimum_at = block + form.key_scale + numbers, block + form.key_minimum + numbers
    if block_size % LANES == 0:
        for t in range(0, block_size, LANES):
            panel, scales = panels + 4 * size * (begin + t), load(scale_at + 2 * t, FLOAT16)
            scales = multiply(scales, splat(form.key_factor))
            minimums = load(minimum_at + 2 * t, FLOAT16) if form.key_minimum > 0 else splat(_ZERO)
            for d in range(size):
                store(panel + PANEL * d, fma(load(codes + d * block_size + t, tag), scales, minimums), FLOAT32)
    else:
        panel = panels + 4 * size * (begin // LANES * LANES) + 4 * (begin % LANES)
        for t in range(block_size):
            scale = np.float32(load_scalar(scale_at + 2 * t, FLOAT16) * form.key_factor)
            minimum = load_scalar(minimum_at + 2 * t, FLOAT16) if form.key_minimum > 0 else _ZERO
            for d in range(size):
                x = fma(load_scalar(codes + d * block_size + t, tag), scale, minimum)
                store(panel + PANEL * d + 4 * t, x, FLOAT32)


@inlined
def _read_channel_keys(block: int, record: int, head: int, size: int, block_size: int, panels: int, begin: int) -> None:
    form, half = format_at(record), size // 2
    codes, numbers = block + head * half * block_size, 2 * size * head
    for d in range(half):
        low_scale = load_scalar(block + form.key_scale + numbers + 2 * d, FLOAT16)
        low_minimum = load_scalar(block + form.key_minimum + numbers + 2 * d, FLOAT16)
        high_scale = load_scalar(block + form.key_scale + numbers + 2 * (d + half), FLOAT16)
        high_minimum = load_scalar(block + form.key_minimum + numbers + 2 * (d + half), FLOAT16)
        if block_size % LANES == 0:
            for t in range(0, block_size, LANES):
                line, panel = codes + d * block_size + t, panels + 4 * size * (begin + t) + PANEL * d
                store(panel, fma(load(line, UINT4), splat(low_scale), splat(low_minimum)), FLOAT32)
                high = fma(load_upper(line, UINT4), splat(high_scale), splat(high_minimum))
                store(panel + PANEL * half, high, FLOAT32)
        else:
            panel = panels + 4 * size * (begin // LANES * LANES) + 4 * (begin % LANES) + PANEL * d
            for t in range(block_size):
                line = codes + d * block_size + t
                store(panel + 4 * t, fma(load_scalar(line, UINT4), low_scale, low_minimum), FLOAT32)
                high_number = fma(load_upper_scalar(line, UINT4), high_scale, high_minimum)
                store(panel + PANEL * half + 4 * t, high_number, FLOAT32)


@inlined
def read_value_codes(
    block: int, record: int, head: int, size: int, block_size: int, target: int, token_stride: int, channel_stride: int
) -> None:
    """Read the values of a head to float32: token t's channels d to d + 15 at t * token_stride + d * channel_stride."""
    kind = format_at(record).value_kind
    if kind == UINT8_TOKEN:
        _read_values(block, record, head, size, block_size, target, token_stride, channel_stride, UINT8)
    elif kind == FLOAT8_TOKEN:
        _read_values(block, record, head, size, block_size, target, token_stride, channel_stride, FLOAT8)
    else:
        _read_values(block, record, head, size, block_size, target, token_stride, channel_stride, UINT4)


@inlined
def _read_values(
    block: int, record: int, head: int, size: int, block_size: int, target: int, token_stride: int,
    channel_stride: int, tag: Any,
) -> None:  # fmt: skip
    form, half, width = format_at(record), size // 2, size // codes_in_byte(tag)
    codes, numbers = block + form.value + head * block_size * width, 2 * block_size * head
    for t in range(block_size):
        scale = np.float32(load_scalar(block + form.value_scale + numbers + 2 * t, FLOAT16) * form.value_factor)
        minimum = _ZERO
        if form.value_minimum > 0:
            minimum = load_scalar(block + form.value_minimum + numbers + 2 * t, FLOAT16)
        line, row = codes + t * width, target + t * token_stride
        if codes_in_byte(tag) == 1:
            for d in range(0, size, LANES):
                store(row + d * channel_stride, fma(load(line + d, tag), splat(scale), splat(minimum)), FLOAT32)
        elif half % LANES == 0:
            for d in range(0, half, LANES):
                store(row + d * channel_stride, fma(load(line + d, tag), splat(scale), splat(minimum)), FLOAT32)
                high = fma(load_upper(line + d, tag), splat(scale), splat(minimum))
                store(row + (half + d) * channel_stride, high, FLOAT32)
        else:
            for d in range(half):
                at = row + d // LANES * LANES * channel_stride + 4 * (d % LANES)
                store(at, fma(load_scalar(line + d, tag), scale, minimum), FLOAT32)
                at = row + (half + d) // LANES * LANES * channel_stride + 4 * ((half + d) % LANES)
                store(at, fma(load_upper_scalar(line + d, tag), scale, minimum), FLOAT32)
