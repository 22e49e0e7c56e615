"""Norms, rotation and gating for CPUs: one compiled call each, in place of five to ten torch calls.

A decode step makes four such calls a layer, and each moves a few kilobytes: what they cost is calls, not arithmetic. So
few rows are computed where the call is made; many (a prefill chunk's) are shared out among torch's threads.
What goes into matrix products and comes out of them has the dtype that those take, float32 or bfloat16: converting it
in calls of its own took an eighth of a prefill. The residual stream, and all arithmetic here, is float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray
from torch import Tensor

from kernels.cpu.runtime import c_function, compiled, inlined, instruction, run_on_threads
from kernels.cpu.vector import BFLOAT16, FLOAT32, fetch_and_add, narrowed, offset_of, record_at, widened

Function = TypeVar("Function", bound=Callable[..., Any])

_SERIAL_ELEMENTS = 1 << 16  # below, waking the threads costs as much as they save
_CHUNK_ROWS = 8  # that a thread takes at once
_TAGS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

# exp(x) = 2^n * exp(r), r in [-ln 2 / 2, ln 2 / 2]; ln 2 in two parts keeps r exact (Cody and Waite 1980).
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_LIMIT = np.float32(87.0)  # 2^n stays a normal number


# ---- one row


def _fast(*flags: str) -> Callable[[Function], Function]:
    """Decorate as `inlined` does, with products and sums fused, and with the other fast-math flags named."""
    decorate = numba.njit(fastmath={"contract", *flags}, nogil=True, boundscheck=False, error_model="numpy")
    return cast(Callable[[Function], Function], decorate)


@inlined
def _exp(x: Any) -> Any:
    """exp(x) that the compiler turns into vector instructions; relative error below 2e-7 within +-87, clamped there."""
    x = min(max(x, -_EXP_LIMIT), _EXP_LIMIT)
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@_fast("reassoc")  # lets the sum of squares run in vector lanes; how it is cut depends on the row's length alone
def _add_norm_row(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    size = residual.shape[0]
    total = np.float32(0.0)
    for i in range(size):
        residual[i] += widened(delta[i])
        total += residual[i] * residual[i]
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        out[i] = narrowed(residual[i] * scale * weight[i], out[i])


@_fast()
def _rotate_head(head: Any, cos: Any, sin: Any) -> None:
    half = cos.shape[0]
    left, right = head[:half], head[half:]
    for i in range(half):
        x, y = widened(left[i]), widened(right[i])
        left[i] = narrowed(x * cos[i] - y * sin[i], left[i])
        right[i] = narrowed(y * cos[i] + x * sin[i], right[i])


@_fast()
def _silu_mul_row(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        x = widened(gate[i])
        out[i] = narrowed(x * widened(up[i]) / (np.float32(1.0) + _exp(-x)), out[i])


# ---- rows, where the call is made


@compiled
def _add_norm(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    for t in range(residual.shape[0]):
        _add_norm_row(residual[t], delta[t], weight, eps, out[t])


@compiled
def _rotate(heads: Any, num_rotated: Any, cos: Any, sin: Any) -> None:
    for t in range(heads.shape[0]):
        for h in range(num_rotated):
            _rotate_head(heads[t, h], cos[t], sin[t])


@compiled
def _silu_mul(gate_up: Any, out: Any) -> None:
    size = out.shape[1]
    for t in range(out.shape[0]):
        _silu_mul_row(gate_up[t, :size], gate_up[t, size:], out[t])


# ---- rows, shared out among threads

_JOB = np.dtype(
    [(name, np.int64) for name in ("next_row", "num_rows", "a", "b", "c", "d", "num_heads", "num_rotated", "size")]
    + [("eps", np.float32)],
    align=True,
)
_job_at = record_at(_JOB)
_NEXT_ROW = offset_of(_JOB, "next_row")
_pointer_to: Any = types.CPointer  # Numba's constructor has no annotations


@instruction
def _pointer(_typing: Any, address: Any, tag: Any) -> Any:
    """_pointer(address, tag): what carray takes, to elements of the tag's dtype."""
    pointer = _pointer_to(tag)
    return pointer(address, tag), lambda context, builder, _s, args: builder.inttoptr(
        args[0], context.get_value_type(pointer)
    )


@inlined
def _take_rows(address: int, num_rows: int) -> tuple[int, int]:
    """Return the next rows that nobody has taken, begin and end; at the end they are none."""
    begin = fetch_and_add(address + _NEXT_ROW, _CHUNK_ROWS)
    return min(begin, num_rows), min(begin + _CHUNK_ROWS, num_rows)


def _run_add_norm(address: int, tag: Any) -> None:
    job = _job_at(address)
    shape = (job.num_rows, job.size)
    residual, weight = carray(_pointer(job.a, FLOAT32), shape), carray(_pointer(job.c, FLOAT32), job.size)
    delta, out = carray(_pointer(job.b, tag), shape), carray(_pointer(job.d, tag), shape)
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _add_norm(residual[begin:end], delta[begin:end], weight, job.eps, out[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _run_rotate(address: int, tag: Any) -> None:
    job = _job_at(address)
    heads = carray(_pointer(job.a, tag), (job.num_rows, job.num_heads, job.size))
    shape = (job.num_rows, job.size // 2)
    cos, sin = carray(_pointer(job.b, FLOAT32), shape), carray(_pointer(job.c, FLOAT32), shape)
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _rotate(heads[begin:end], job.num_rotated, cos[begin:end], sin[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _run_silu_mul(address: int, tag: Any) -> None:
    job = _job_at(address)
    gate_up = carray(_pointer(job.a, tag), (job.num_rows, 2 * job.size))
    out = carray(_pointer(job.b, tag), (job.num_rows, job.size))
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _silu_mul(gate_up[begin:end], out[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _share_out(body: int, num_rows: int, tensors: tuple[Tensor, ...], **sizes: float) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), "threads find rows by their number alone"
    job = np.zeros(1, _JOB)
    job["num_rows"] = num_rows
    for name, tensor in zip("abcd", tensors, strict=False):
        job[name] = tensor.data_ptr()
    for name, value in sizes.items():
        job[name] = value
    run_on_threads(body, job.ctypes.data, torch.get_num_threads())


def _array(tensor: Tensor) -> Any:
    """Return a tensor's memory as an array; numpy has no bfloat16, so that is uint16 there."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@dataclass(frozen=True, slots=True)
class _Bodies:
    """What threads run for one dtype of products: addresses of C functions."""

    add_norm: int
    rotate: int
    silu_mul: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> "_Bodies":
        tag = _TAGS[dtype]
        return cls(
            c_function(_run_add_norm, 1, tag), c_function(_run_rotate, 1, tag), c_function(_run_silu_mul, 1, tag)
        )


class CpuElementwise:
    """The decoder's elementwise operations on contiguous tensors, T tokens first.

    The residual stream, norm weights, cos and sin are float32. Products' inputs and results are float32 or have the
    dtype named when it is made, float32 or bfloat16; those of one call have one dtype. What it needs is compiled, or
    loaded from the cache, when it is made.
    """

    def __init__(self, product_dtype: torch.dtype = torch.float32) -> None:
        self._bodies = {dtype: _Bodies.of(dtype) for dtype in {torch.float32, product_dtype}}
        row, half = torch.ones(1, 2), torch.ones(1, 1)
        for dtype in self._bodies:
            product = row.to(dtype)
            self.add_rms_norm(row.clone(), product, torch.ones(2), 1e-6, product.clone())
            self.rotate(product.view(1, 1, 2), 1, half, half)
            self.silu_mul(product, product[:, :1].clone())

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight; all [T, H], weight [H]."""
        if residual.numel() < _SERIAL_ELEMENTS:
            _add_norm(residual.numpy(), _array(delta), weight.numpy(), np.float32(eps), _array(out))
            return
        num_rows, size = residual.shape
        body = self._bodies[out.dtype].add_norm
        _share_out(body, num_rows, (residual, delta, weight, out), size=size, eps=eps)

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `num_rotated` of heads [T, heads, D] in place.

        Channel i is paired with i + D / 2; cos and sin are [T, D / 2].
        """
        if heads.numel() < _SERIAL_ELEMENTS:
            _rotate(_array(heads), num_rotated, cos.numpy(), sin.numpy())
            return
        num_rows, num_heads, size = heads.shape
        body, tensors = self._bodies[heads.dtype].rotate, (heads, cos, sin)
        _share_out(body, num_rows, tensors, num_heads=num_heads, num_rotated=num_rotated, size=size)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up for gate_up [T, 2 I], gate first; out [T, I]."""
        if gate_up.numel() < _SERIAL_ELEMENTS:
            _silu_mul(_array(gate_up), _array(out))
            return
        num_rows, size = out.shape
        _share_out(self._bodies[out.dtype].silu_mul, num_rows, (gate_up, out), size=size)
