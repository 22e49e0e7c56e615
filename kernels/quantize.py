"""Keys and values of one block to codes and back, in plain torch: the formula of `Backend.requantize_blocks`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import Codec, Encoding, Group

LARGEST_FLOAT16 = 65504.0
LARGEST_FLOAT8 = 448.0
LEVELS = {Encoding.UINT8: 255.0, Encoding.UINT4: 15.0}  # the largest code

_GROUP_DIMENSION = {Group.TOKEN: 2, Group.CHANNEL: 1}


@dataclass(frozen=True, slots=True)
class Quantized:
    """The keys or the values of a block as codes: [num_heads, block_size, head_size]."""

    codes: Tensor  # uint8, or float8_e4m3fn
    scale: Tensor  # float16, with size 1 in the dimension that shares it
    minimum: Tensor | None  # as scale


def quantize(x: Tensor, codec: Codec) -> Quantized:
    """Return float32 [num_heads, block_size, head_size] as codes with their scales; x is not changed."""
    assert codec.group is not None
    x = x.nan_to_num(0.0).clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16) + 0.0  # there is one zero
    dim = _GROUP_DIMENSION[codec.group]
    if codec.encoding is Encoding.FLOAT8:
        scale = round_up(x.abs().amax(dim, keepdim=True) / LARGEST_FLOAT8)
        codes = _divide(x, scale).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8)
        return Quantized(codes.to(torch.float8_e4m3fn), scale, None)
    levels = LEVELS[codec.encoding]
    minimum = round_down(x.amin(dim, keepdim=True))
    scale = round_up((x.amax(dim, keepdim=True) - minimum.float()) / levels)
    codes = _divide(x - minimum.float(), scale).round().clamp(0, levels)
    return Quantized(codes.to(torch.uint8), scale, minimum)


def dequantize(quantized: Quantized) -> Tensor:
    """Return what codes stand for, float32 [num_heads, block_size, head_size]."""
    x = quantized.codes.float() * quantized.scale.float()
    return x if quantized.minimum is None else x + quantized.minimum.float()


def round_down(x: Tensor) -> Tensor:
    """Return the largest float16 that is not above each of the float32 x, all within float16's range."""
    nearest = x.to(torch.float16)
    bits = nearest.view(torch.int16)
    below = torch.where(nearest > 0, bits - 1, bits + 1)  # a float's magnitude counts up with its bits
    below = torch.where(nearest == 0, torch.tensor(-0x7FFF, dtype=torch.int16), below)  # the smallest below zero
    return torch.where(nearest.float() > x, below, bits).view(torch.float16)


def round_up(x: Tensor) -> Tensor:
    """Return the smallest float16 that is not below each of the float32 x, all within float16's range."""
    return -round_down(-x)


def pack_halves(codes: Tensor) -> Tensor:
    """Return uint8 codes below 16, [..., size], two in a byte: d with d + ceil(size / 2)."""
    half = -(-codes.shape[-1] // 2)
    upper = torch.nn.functional.pad(codes[..., half:], (0, 2 * half - codes.shape[-1]))
    return codes[..., :half] | upper << 4


def unpack_halves(packed: Tensor, size: int) -> Tensor:
    """Return the uint8 codes, [..., size], of `pack_halves`."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)[..., :size]


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, 0 where the scale is 0: what x is then there."""
    return torch.where(scale > 0, x / scale.float(), 0.0)
