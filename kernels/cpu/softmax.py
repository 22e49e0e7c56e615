"""Online softmax (Milakov and Gimelshein, 2018) over tiles of 64 scores, and the merging of parts of a context.

Scores count in powers of 2: queries are scaled by log2(e) when they are read, so that a probability is
2 ** (score - top). A row's state is (top, total, out): the largest score so far, and with it as the reference the sum
of the probabilities and the sum of probability * value.
"""

import math
from typing import Any

import numpy as np

from kernels.cpu.runtime import inlined
from kernels.cpu.vector import (
    FLOAT32,
    LANES,
    add,
    divide,
    exp2_of_negative,
    fma,
    inside,
    largest_lane,
    load,
    maximum,
    multiply,
    negative_magnitude,
    splat,
    store,
    subtract,
    sum_of_lanes,
    with_sign_of,
)

TILE_TOKENS = 64
# `top` of a row that has seen no key. A masked score lies so far below that its probability is 0 even then.
NO_TOP = np.float32(-1e30)
MASKED = np.float32(-3e38)

_TWO_LOG2E = np.float32(2 * math.log2(math.e))
_ONE, _MINUS_TWO = np.float32(1), np.float32(-2)


@inlined
def softmax_tile(scores: int, first: int, end: int, cap: float, top: float) -> tuple[float, float, float]:
    """Turn a row's tile of scores (an address) into probabilities; those outside first <= token < end become 0.

    `cap` above 0 is the soft cap: scores come divided by it, to be replaced by cap * tanh(score). Returns the new top,
    the factor that brings older sums to it, and the sum of the tile's probabilities. A tile without a key changes
    nothing.
    """
    best = splat(MASKED)
    for j in range(TILE_TOKENS // LANES):
        x = load(scores + 4 * LANES * j, FLOAT32)
        if cap > 0:
            x = multiply(splat(cap), _tanh(x))
        x = inside(x, np.int32(first - LANES * j), np.int32(end - LANES * j), MASKED)
        store(scores + 4 * LANES * j, x, FLOAT32)
        best = maximum(best, x)
    new_top = max(top, largest_lane(best))
    total = splat(np.float32(0))
    for j in range(TILE_TOKENS // LANES):
        p = exp2_of_negative(subtract(load(scores + 4 * LANES * j, FLOAT32), splat(new_top)))
        store(scores + 4 * LANES * j, p, FLOAT32)
        total = add(total, p)
    return new_top, exp2_of_negative(np.float32(top - new_top)), sum_of_lanes(total)


@inlined
def _tanh(x: Any) -> Any:
    """Tanh of a vector: (1 - e) / (1 + e) with e = exp(-2 |x|), to 2e-7 absolute."""
    e = exp2_of_negative(multiply(splat(_TWO_LOG2E), negative_magnitude(x)))
    magnitude = divide(subtract(splat(_ONE), e), add(splat(_ONE), e))
    return with_sign_of(magnitude, x)


@inlined
def rescale(out: int, channels: int, factor: float) -> None:
    """Multiply a row of float32 at an address."""
    if factor != _ONE:
        for i in range(0, 4 * channels, 4 * LANES):
            store(out + i, multiply(splat(factor), load(out + i, FLOAT32)), FLOAT32)


@inlined
def merge(
    top: float, total: float, out: int, part_top: float, part_total: float, part_out: int, channels: int
) -> tuple[float, float]:
    """Merge a later part of the context into a row's state; returns its new top and total, and changes `out`.

    Merging a part in which the row saw no key changes nothing, bit for bit.
    """
    new_top = max(top, part_top)
    keep, weight = exp2_of_negative(np.float32(top - new_top)), exp2_of_negative(np.float32(part_top - new_top))
    for i in range(0, 4 * channels, 4 * LANES):
        kept = multiply(splat(keep), load(out + i, FLOAT32))
        store(out + i, fma(splat(weight), load(part_out + i, FLOAT32), kept), FLOAT32)
    new_total: Any = np.float32(np.float32(total * keep) + np.float32(part_total * weight))
    return new_top, new_total
