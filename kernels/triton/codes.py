"""Numbers to codes and back: the arithmetic of `kernels.dispatch.Backend.requantize_blocks`, to the last bit.

Codes become numbers, and numbers codes, by what their bits mean, so every chip does the same, the interpreter too:
conversions of float8 are missing on some chips, mean another float8 on others, and those of integers are slow on most.

In registers a head's channels stand in two halves, each padded to half of HEAD_PAD: what a byte of int4 holds, channels
d and d + HEAD_SIZE / 2, then lies HEAD_PAD / 2 apart, for every head size.

    HEAD_SIZE 96   | channels 0 to 47 | padding, 16 | channels 48 to 95 | padding, 16 |
"""

import triton
import triton.language as tl

from kernels.triton.places import FLOAT8, UINT8

LARGEST_FLOAT16 = tl.constexpr(65504.0)
LARGEST_FLOAT8 = tl.constexpr(448.0)

# 2^23: a float32 there counts in ones, so its lowest bits are an integer, and a sum with it is rounded to one, to even.
_ONES = tl.constexpr(8388608.0)
_ONES_BITS = tl.constexpr(0x4B000000)


@triton.jit
def channels(HEAD_SIZE: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Return which channel stands where, [HEAD_PAD], and whether it is one and not padding."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    HALF_PAD: tl.constexpr = HEAD_PAD // 2
    channel = tl.arange(0, HEAD_PAD)
    is_channel = channel < HEAD_SIZE
    if HEAD_PAD > HEAD_SIZE:
        is_channel = channel % HALF_PAD < HALF
        channel = channel // HALF_PAD * HALF + channel % HALF_PAD
    return channel, is_channel


@triton.jit
def number_of(code, CODEC: tl.constexpr):
    """Return what uint8 codes count, float32."""
    bits = code.to(tl.int32)
    if CODEC == FLOAT8:
        # Sign, exponent and mantissa in their places; the exponents' zeros lie 120 apart. Small numbers come out right.
        number = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    else:
        number = (bits | _ONES_BITS).to(tl.float32, bitcast=True) - _ONES
    return number


@triton.jit
def rounded(x):
    """Return float32 from 0 to 2^22 as the nearest integers, ties to even, int32."""
    return (x + _ONES).to(tl.int32, bitcast=True) - _ONES_BITS


@triton.jit
def float8_of(x):
    """Return float32 within 448 as float8 e4m3fn, ties to even, uint8."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Half of the last kept bit is added, a little less where the kept part is even.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = rounded(tl.abs(x) * 512)  # below 2^-6 codes count in steps of 2^-9
    code = tl.where(magnitude < (121 << 23), small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_down(x):
    """Return the largest float16 that is not above each of the float32 x, all within float16's range."""
    nearest = x.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True).to(tl.int32)
    below = tl.where(nearest > 0, bits - 1, bits + 1)  # a float's magnitude counts up with its bits
    below = tl.where(nearest == 0, -0x7FFF, below)  # the smallest below zero
    return tl.where(nearest.to(tl.float32) > x, below, bits).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def round_up(x):
    """Return the smallest float16 that is not below each of the float32 x, all within float16's range."""
    return -round_down(-x)


@triton.jit
def divided(x, scale):
    """Return x / scale, rounded once; x, which is 0, where the scale is 0."""
    return tl.div_rn(x, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(x))


@triton.jit
def quantize(x, is_channel, CODEC: tl.constexpr, AXIS: tl.constexpr):
    """Return the codes of float32 [tokens, HEAD_PAD], and the scales and minimums of its groups along an axis.

    The axis has size 1 in scales and minimums. What stands where `is_channel`, [HEAD_PAD], is false is ignored. float8
    has no minimums: the scales stand in their place.
    """
    x = tl.where(x == x, x, 0.0)
    x = tl.minimum(tl.maximum(x, -LARGEST_FLOAT16), LARGEST_FLOAT16)
    x = tl.where(x == 0, 0.0, x)  # there is one zero
    if CODEC == FLOAT8:
        largest = tl.max(tl.where(is_channel[None, :], tl.abs(x), 0.0), AXIS, keep_dims=True)
        scale = round_up(tl.div_rn(largest, tl.full(largest.shape, LARGEST_FLOAT8, tl.float32)))
        steps = divided(x, scale.to(tl.float32))
        codes = float8_of(tl.minimum(tl.maximum(steps, -LARGEST_FLOAT8), LARGEST_FLOAT8))
        minimum = scale
    else:
        LEVELS: tl.constexpr = 255 if CODEC == UINT8 else 15
        minimum = round_down(tl.min(tl.where(is_channel[None, :], x, LARGEST_FLOAT16), AXIS, keep_dims=True))
        largest = tl.max(tl.where(is_channel[None, :], x, -LARGEST_FLOAT16), AXIS, keep_dims=True)
        span = largest - minimum.to(tl.float32)
        scale = round_up(tl.div_rn(span, tl.full(span.shape, LEVELS, tl.float32)))
        # Padding may lie below the minimum.
        steps = divided(tl.maximum(x - minimum.to(tl.float32), 0.0), scale.to(tl.float32))
        codes = tl.minimum(rounded(steps), LEVELS).to(tl.uint8)
    return codes, scale, minimum


@triton.jit
def join_halves(packed):
    """Return the codes, [rows, 2 * width], of bytes [rows, width]: the lower halves, then the upper ones."""
    pairs = tl.join(packed & 15, packed >> 4)
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (packed.shape[0], 2 * packed.shape[1]))


@triton.jit
def pack_halves(codes):
    """Return the bytes, [rows, width / 2], of `join_halves`."""
    halves = tl.reshape(codes, (codes.shape[0], 2, codes.shape[1] // 2))
    lower, upper = tl.split(tl.permute(halves, (0, 2, 1)))
    return lower | (upper << 4)
