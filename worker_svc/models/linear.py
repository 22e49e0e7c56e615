"""Matrix products with weights packed once, in the way that is fastest on this machine.

torch's plain products are several times slower than need be on CPUs, because they repack weights at every call and have
no good bf16 path without bf16 hardware. 30 layers of a 135M model on two Zen 3 cores, 8 rows, in ms: plain bf16 115,
plain float32 100, oneDNN packed float32 47, FBGEMM packed fp16 24. At 512 rows: 6,700, 1,030, 840 and 710. So:

| compute dtype | device | strategy |
| --- | --- | --- |
| any | GPU | `PlainLinear` |
| float32 | CPU | `PackedFloat32Linear` |
| bfloat16 | CPU that multiplies bf16 | `PackedBFloat16Linear`, `PackedHalfLinear` for the head |
| bfloat16, float16 | other CPU | `PackedHalfLinear` |

A strategy that this build of torch lacks, or a weight beyond fp16's range, falls to the next: packed float32, then
plain. bf16's 8 bits of mantissa are exact in fp16.
"""

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_HALF_MAX = torch.finfo(torch.float16).max
_HALF_DTYPES = (torch.bfloat16, torch.float16)


class Linear(Protocol):
    """y = x W^T + b."""

    weight_bytes: int  # held in memory, padding included
    dtype: torch.dtype  # of x, and of y but a head's, which is float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [T, out_features] for contiguous x [T, in_features]."""


class PlainLinear:
    """torch's own product, which the GPU libraries make fast; shares its weight with whoever else holds it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.weight_bytes = weight.nbytes + _nbytes(bias)
        self.dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        return F.linear(x, self._weight, self._bias)


class PlainHead:
    """The head on a GPU: half-precision inputs, sums kept in float32 rather than rounded to bf16's three digits.

    (Where torch has no such product, on AMD's, the logits are rounded and then widened.)
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.weight_bytes = weight.nbytes
        self.dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [T, out_features]."""
        if x.is_cuda and x.dtype in _HALF_DTYPES and torch.version.hip is None:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x, self.weight).to(torch.float32)


class PackedFloat32Linear:
    """oneDNN, float32 weights reordered into its blocked layout.

    A row's result is the same to the last bit however many rows there are: a single one, for which oneDNN may sum in
    another order, is computed twice.
    """

    dtype = torch.float32

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.float32), None)
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()  # oneDNN reads it as dense
        self.weight_bytes = 4 * weight.numel() + _nbytes(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        if len(x) == 1:
            return self(x.expand(2, -1).contiguous())[:1]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class PackedBFloat16Linear:
    """oneDNN, bf16 weights in its blocked layout, for CPUs with bf16 instructions."""

    dtype = torch.bfloat16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16), None)
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self.weight_bytes = 2 * weight.numel() + _nbytes(self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class PackedHalfLinear:
    """FBGEMM, fp16 weights in its blocked layout, multiplied in float32."""

    dtype = torch.float32
    # FBGEMM allocates whole blocks of 512 inputs by 16 outputs; at 576 inputs that is 1.8 times the weights themselves.
    _BLOCK_INPUTS, _BLOCK_OUTPUTS = 512, 16

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32), bias)
        num_outputs, num_inputs = weight.shape
        padded = _round_up(num_outputs, self._BLOCK_OUTPUTS) * _round_up(num_inputs, self._BLOCK_INPUTS)
        self.weight_bytes = 2 * padded + _nbytes(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the residual stream for a compute dtype: float32 on every CPU."""
    return torch.float32 if device.type == "cpu" else dtype


def make_linear(weight: Tensor, bias: Tensor | None, device: torch.device) -> Linear:
    """Return the product for a weight [out, in] and bias [out] whose dtype is the compute dtype.

    On a CPU the weight is copied, never kept.
    """
    if device.type != "cpu":
        return PlainLinear(weight.to(device), None if bias is None else bias.to(device))
    if weight.dtype is torch.bfloat16 and _works(PackedBFloat16Linear):
        return PackedBFloat16Linear(weight, bias)
    return _make_float32_exact(weight, bias)


def make_head(weight: Tensor, device: torch.device) -> Linear:
    """Return the product whose result is float32 whatever the compute dtype, which is the weight's [vocab, in].

    On a GPU it keeps `weight` itself, where that lies on `device`: a tied embedding is held once.
    """
    return PlainHead(weight.to(device)) if device.type != "cpu" else _make_float32_exact(weight, None)


def _make_float32_exact(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the fastest product that neither rounds float32 activations nor sums."""
    fits_half = weight.dtype in _HALF_DTYPES and float(weight.abs().max()) <= _HALF_MAX
    if fits_half and _works(PackedHalfLinear):
        return PackedHalfLinear(weight, bias)
    if _works(PackedFloat32Linear):
        return PackedFloat32Linear(weight, bias)
    return PlainLinear(weight.to(torch.float32, copy=True), None if bias is None else bias.to(torch.float32))


@functools.cache
def _works(strategy: Callable[[Tensor, Tensor | None], Linear]) -> bool:
    """Try a strategy once on a small product: builds of torch differ in what they carry."""
    if strategy is PackedBFloat16Linear and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = torch.linspace(-1.0, 1.0, 32 * 24).reshape(32, 24)
    x = torch.linspace(1.0, -0.5, 2 * 24).reshape(2, 24)
    try:
        product = strategy(weight, weight[:, 0])
        y = product(x.to(product.dtype)).to(x.dtype)
        return torch.allclose(y, F.linear(x, weight, weight[:, 0]), rtol=0.05, atol=0.05)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
