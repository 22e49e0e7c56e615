"""The formats' formulas in NumPy, and a block's planes in one order for all backends."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.dispatch import Backend
from kernels.formats import Format, KVLayout
from kernels.reference import ReferenceBackend

Array = npt.NDArray[Any]

# side, format: kind of code, largest code, axis of [num_heads, block_size, head_size] that shares a scale
_KINDS = {
    ("key", Format.INT8): ("uint", 255, 2),
    ("value", Format.INT8): ("uint", 255, 2),
    ("key", Format.FP8): ("float", 448, 2),
    ("value", Format.FP8): ("float", 448, 2),
    ("key", Format.K8V4): ("uint", 255, 2),
    ("value", Format.K8V4): ("uint", 15, 2),
    ("key", Format.INT4): ("uint", 15, 1),
    ("value", Format.INT4): ("uint", 15, 2),
}

# The magnitudes of e4m3fn by code, 0 to 126: sign, 4 bits of exponent (bias 7), 3 of mantissa; 127 is NaN.
FLOAT8 = np.array(
    [(c % 8) * 2.0**-9 if c < 8 else (1 + c % 8 / 8) * 2.0 ** (c // 8 - 7) for c in range(127)], np.float32
)


@dataclass(frozen=True)
class Side:
    """The keys or the values of a block as codes, uint8 [num_heads, block_size, head_size], and their scales."""

    codes: Array
    scale: Array  # float16 [num_heads, groups]
    minimum: Array | None

    def assert_same_bits(self, other: "Side") -> None:
        """Fail unless everything is equal to the last bit."""
        np.testing.assert_array_equal(self.scale.view(np.uint16), other.scale.view(np.uint16))
        if self.minimum is not None and other.minimum is not None:
            np.testing.assert_array_equal(self.minimum.view(np.uint16), other.minimum.view(np.uint16))
        assert (self.minimum is None) == (other.minimum is None)
        np.testing.assert_array_equal(self.codes, other.codes)


def quantized(x: Array, side: str, fmt: Format) -> Side:
    """Return float32 [num_heads, block_size, head_size] quantized as `Backend.requantize_blocks` says."""
    kind, largest, axis = _KINDS[side, fmt]
    x = np.where(np.isnan(x), np.float32(0), np.clip(x, np.float32(-65504), np.float32(65504))) + np.float32(0)
    levels = np.float32(largest)
    if kind == "float":
        scale = _not_below(np.abs(x).max(axis) / levels)
        return Side(_float8_codes(_divided(x, scale, axis)), scale, None)
    minimum = _not_above(x.min(axis))
    scale = _not_below((x.max(axis) - minimum.astype(np.float32)) / levels)
    steps = _divided(x - np.expand_dims(minimum, axis).astype(np.float32), scale, axis)
    return Side(np.clip(np.rint(steps), 0, largest).astype(np.uint8), scale, minimum)


def dequantized(quantized: Side, side: str, fmt: Format) -> Array:
    """Return what codes stand for, float32 [num_heads, block_size, head_size]."""
    kind, _, axis = _KINDS[side, fmt]
    codes = quantized.codes
    signs = np.where(codes >= 128, np.float32(-1), np.float32(1))
    numbers = FLOAT8[codes & 127] * signs if kind == "float" else codes.astype(np.float32)
    x = numbers * np.expand_dims(quantized.scale, axis).astype(np.float32)
    return x if quantized.minimum is None else x + np.expand_dims(quantized.minimum, axis).astype(np.float32)


def read_side(backend: Backend, block: Tensor, side: str, layout: KVLayout, fmt: Format) -> Side:
    """Return the keys or the values of a block's bytes, whatever order the backend keeps them in."""
    data, planes = block.numpy(), layout.planes(fmt)

    def plane(name: str) -> Array:
        return data[planes[name].offset :][: planes[name].num_bytes]

    kind, largest, _ = _KINDS[side, fmt]
    tokens, width = layout.block_size, layout.head_size if largest > 15 else layout.head_size // 2
    if side == "key" and not isinstance(backend, ReferenceBackend):  # channel-major
        codes = plane(side).reshape(-1, width, tokens).transpose(0, 2, 1)
    else:
        codes = plane(side).reshape(-1, tokens, width)
    if largest == 15:
        codes = np.concatenate([codes & 15, codes >> 4], axis=2)
    scales = [plane(name).view(np.float16).reshape(layout.num_kv_heads, -1) for name in planes if f"{side}_" in name]
    return Side(codes, scales[0], scales[1] if kind == "uint" else None)


def _not_above(x: Array) -> Array:
    nearest = x.astype(np.float16)
    return np.where(nearest.astype(np.float32) > x, np.nextafter(nearest, np.float16(-65504)), nearest)


def _not_below(x: Array) -> Array:
    nearest = x.astype(np.float16)
    return np.where(nearest.astype(np.float32) < x, np.nextafter(nearest, np.float16(65504)), nearest)


def _divided(x: Array, scale: Array, axis: int) -> Array:
    divisor = np.expand_dims(scale, axis).astype(np.float32)
    steps: Array = np.where(divisor > 0, x / np.where(divisor > 0, divisor, np.float32(1)), np.float32(0))
    return steps


def _float8_codes(x: Array) -> Array:
    """Return the nearest float8 of each number; of two as near, the one whose code is even."""
    distances = np.abs(np.abs(x).astype(np.float64)[..., None] - FLOAT8)
    nearest = distances.argmin(-1)  # of two as near, the lower code
    above = np.minimum(nearest + 1, len(FLOAT8) - 1)
    tie = np.take_along_axis(distances, above[..., None], -1)[..., 0] == distances.min(-1)
    codes = np.where(tie & (nearest % 2 == 1), above, nearest) + 128 * np.signbit(x)
    return np.asarray(codes, np.uint8)
