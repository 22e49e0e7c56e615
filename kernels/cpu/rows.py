"""Rows of activations, whose dtype is known at run time only: read to float32, written back rounded.

Activations are few beside the KV they meet, so their dtype is a code and a branch, and not a compile variant.
"""

from typing import Any

import numpy as np
import torch

from kernels.cpu.runtime import inlined
from kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32, LANES, divide, load, multiply, splat, store

ACTIVATION_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@inlined
def activation_bytes(dtype_code: int) -> int:
    """Return the bytes of one element."""
    return 4 if dtype_code == 0 else 2


@inlined
def read(source: int, dtype_code: int) -> Any:
    """Read 16 elements at an address into a vector of float32."""
    if dtype_code == 0:
        return load(source, FLOAT32)
    if dtype_code == 1:
        return load(source, BFLOAT16)
    return load(source, FLOAT16)


@inlined
def read_scaled(source: int, dtype_code: int, row: int, channels: int, factor: float) -> None:
    """Read a row of activations at an address into float32, times a factor."""
    item = activation_bytes(dtype_code)
    for i in range(0, channels, LANES):
        store(row + 4 * i, multiply(read(source + item * i, dtype_code), splat(factor)), FLOAT32)


@inlined
def write_divided(row: int, divisor: float, target: int, dtype_code: int, channels: int) -> None:
    """Write a float32 row, divided by a number, as a row of activations."""
    for i in range(0, channels, LANES):
        x = divide(load(row + 4 * i, FLOAT32), splat(np.float32(divisor)))
        if dtype_code == 0:
            store(target + 4 * i, x, FLOAT32)
        elif dtype_code == 1:
            store(target + 2 * i, x, BFLOAT16)
        else:
            store(target + 2 * i, x, FLOAT16)
