"""Norms, rotation and gating for CPUs: one compiled call each, in place of five to ten torch calls.

A decode step makes four such calls a layer, and each moves a few kilobytes: what they cost is calls, not arithmetic. So
few rows are computed where the call is made; many (a prefill chunk's) are shared out among torch's threads.
All tensors are float32, which activations on CPUs are whatever the dtype of weights and KV.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

from kernels.cpu.runtime import c_function, compiled, inlined, run_on_threads
from kernels.cpu.vector import fetch_and_add

Function = TypeVar("Function", bound=Callable[..., Any])

_SERIAL_ELEMENTS = 1 << 16  # below, waking the threads costs as much as they save
_CHUNK_ROWS = 8  # that a thread takes at once

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
        residual[i] += delta[i]
        total += residual[i] * residual[i]
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        out[i] = residual[i] * scale * weight[i]


@_fast()
def _rotate_head(head: Any, cos: Any, sin: Any) -> None:
    half = cos.shape[0]
    left, right = head[:half], head[half:]
    for i in range(half):
        x, y = left[i], right[i]
        left[i] = x * cos[i] - y * sin[i]
        right[i] = y * cos[i] + x * sin[i]


@_fast()
def _silu_mul_row(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = gate[i] * up[i] / (np.float32(1.0) + _exp(-gate[i]))


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
_NEXT_ROW = _JOB.fields["next_row"][1] if _JOB.fields else 0


def _type_pointer(_typing: Any, address: Any) -> Any:
    """_as_pointer(address): what carray takes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(address), emit


# Any: Numba's own types describe what Python would call, which nobody does.
_as_pointer: Any = intrinsic(_type_pointer)
_fetch_and_add: Any = fetch_and_add


@inlined
def _take_rows(address: int, num_rows: int) -> tuple[int, int]:
    """Return the next rows that nobody has taken, begin and end; at the end they are none."""
    begin = _fetch_and_add(address + _NEXT_ROW, _CHUNK_ROWS)
    return min(begin, num_rows), min(begin + _CHUNK_ROWS, num_rows)


@inlined
def _floats(address: int, shape: Any) -> Any:
    return carray(_as_pointer(address), shape, np.float32)


def _run_add_norm(address: int) -> None:
    job = carray(_as_pointer(address), 1, _JOB)[0]
    shape = (job.num_rows, job.size)
    residual, delta, out = _floats(job.a, shape), _floats(job.b, shape), _floats(job.d, shape)
    weight = _floats(job.c, job.size)
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _add_norm(residual[begin:end], delta[begin:end], weight, job.eps, out[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _run_rotate(address: int) -> None:
    job = carray(_as_pointer(address), 1, _JOB)[0]
    heads = _floats(job.a, (job.num_rows, job.num_heads, job.size))
    shape = (job.num_rows, job.size // 2)
    cos, sin = _floats(job.b, shape), _floats(job.c, shape)
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _rotate(heads[begin:end], job.num_rotated, cos[begin:end], sin[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _run_silu_mul(address: int) -> None:
    job = carray(_as_pointer(address), 1, _JOB)[0]
    gate_up, out = _floats(job.a, (job.num_rows, 2 * job.size)), _floats(job.b, (job.num_rows, job.size))
    begin, end = _take_rows(address, job.num_rows)
    while begin < end:
        _silu_mul(gate_up[begin:end], out[begin:end])
        begin, end = _take_rows(address, job.num_rows)


def _share_out(body: int, num_rows: int, tensors: tuple[Tensor, ...], **sizes: float) -> None:
    job = np.zeros(1, _JOB)
    job["num_rows"] = num_rows
    for name, tensor in zip("abcd", tensors, strict=False):
        job[name] = tensor.data_ptr()
    for name, value in sizes.items():
        job[name] = value
    run_on_threads(body, job.ctypes.data, torch.get_num_threads())


class CpuElementwise:
    """The decoder's elementwise operations on contiguous tensors, T tokens first. What it needs is compiled, or loaded
    from the cache, when it is made.
    """

    def __init__(self) -> None:
        self._add_norm_body = c_function(_run_add_norm, 1)
        self._rotate_body = c_function(_run_rotate, 1)
        self._silu_mul_body = c_function(_run_silu_mul, 1)
        row, half = torch.ones(1, 2), torch.ones(1, 1)
        self.add_rms_norm(row, row.clone(), torch.ones(2), 1e-6, row.clone())
        self.rotate(torch.ones(1, 1, 2), 1, half, half)
        self.silu_mul(row, half)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight; all [T, H], weight [H]."""
        if residual.numel() < _SERIAL_ELEMENTS:
            _add_norm(residual.numpy(), delta.numpy(), weight.numpy(), np.float32(eps), out.numpy())
            return
        num_rows, size = residual.shape
        _share_out(self._add_norm_body, num_rows, (residual, delta, weight, out), size=size, eps=eps)

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `num_rotated` of heads [T, heads, D] in place.

        Channel i is paired with i + D / 2; cos and sin are [T, D / 2].
        """
        if heads.numel() < _SERIAL_ELEMENTS:
            _rotate(heads.numpy(), num_rotated, cos.numpy(), sin.numpy())
            return
        num_rows, num_heads, size = heads.shape
        tensors = (heads, cos, sin)
        _share_out(self._rotate_body, num_rows, tensors, num_heads=num_heads, num_rotated=num_rotated, size=size)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up for gate_up [T, 2 I], gate first; out [T, I]."""
        if gate_up.numel() < _SERIAL_ELEMENTS:
            _silu_mul(gate_up.numpy(), out.numpy())
            return
        num_rows, size = out.shape
        _share_out(self._silu_mul_body, num_rows, (gate_up, out), size=size)
