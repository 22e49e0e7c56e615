"""Norms, rotation and gating for CPUs: one compiled call each, in place of five to ten torch calls.

A decode step makes four such calls a layer, and each moves a few kilobytes: what they cost is calls, not arithmetic. So
tensors pass as addresses (as arrays a call took up to twice as long), and few rows are computed where the call is made;
many (a prefill chunk's) are shared out among torch's threads.

What goes into matrix products and comes out of them has the dtype that those take, float32 or bfloat16: converting it
in calls of its own took an eighth of a prefill. The residual stream, and all arithmetic here, is float32.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numba import types
from numba.np.numpy_support import carray
from torch import Tensor

from kernels.cpu.runtime import c_function, compiled_short, inlined, instruction, run_on_threads
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
def _rotate_head(head: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.shape[0]
    for i in range(half):
        x, y = widened(head[i]), widened(head[half + i])
        out[i] = x * cos[i] - y * sin[i]
        out[half + i] = y * cos[i] + x * sin[i]


@_fast()
def _silu_mul_row(gate: Any, up: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        x = widened(gate[i])
        out[i] = narrowed(x * widened(up[i]) / (np.float32(1.0) + _exp(-x)), out[i])


# ---- rows of a call

_ADD_NORM, _ROTATE, _SILU_MUL = range(3)

# One call, as all threads that compute it see it. What its tensors and sizes are, by kind:
#
#            | a        | b     | c      | d   | parts of a row | size, elements of a part
#   add_norm | residual | delta | weight | out | 1              | H
#   rotate   | heads    | cos   | sin    | out | heads          | D
#   silu_mul | gate_up  | out   | -      | -   | 2: gate, up    | I
_CALL = np.dtype(
    [
        (name, np.int64)
        for name in ("kind", "a", "b", "c", "d", "next_row", "num_rows", "num_parts", "num_rotated", "size")
    ]
    + [("eps", np.float32)],
    align=True,
)
_call_at = record_at(_CALL)
_NEXT_ROW = offset_of(_CALL, "next_row")
_pointer_to: Any = types.CPointer  # Numba's constructor has no annotations


@instruction
def _pointer(_typing: Any, address: Any, tag: Any) -> Any:
    """_pointer(address, tag): what carray takes, to elements of the tag's dtype."""
    pointer = _pointer_to(tag)
    return pointer(address, tag), lambda context, builder, _s, args: builder.inttoptr(
        args[0], context.get_value_type(pointer)
    )


@inlined
def _add_norm_rows(address: int, begin: int, end: int, tag: Any) -> None:
    call = _call_at(address)
    shape = (call.num_rows, call.size)
    residual, weight = carray(_pointer(call.a, FLOAT32), shape), carray(_pointer(call.c, FLOAT32), call.size)
    delta, out = carray(_pointer(call.b, tag), shape), carray(_pointer(call.d, tag), shape)
    for t in range(begin, end):
        _add_norm_row(residual[t], delta[t], weight, call.eps, out[t])


@inlined
def _rotate_rows(address: int, begin: int, end: int, tag: Any) -> None:
    call = _call_at(address)
    size = call.size
    shape, half_shape = (call.num_rows, call.num_parts, size), (call.num_rows, size // 2)
    heads, out = carray(_pointer(call.a, tag), shape), carray(_pointer(call.d, FLOAT32), shape)
    cos, sin = carray(_pointer(call.b, FLOAT32), half_shape), carray(_pointer(call.c, FLOAT32), half_shape)
    for t in range(begin, end):
        for h in range(call.num_rotated):
            _rotate_head(heads[t, h], cos[t], sin[t], out[t, h])
        for h in range(call.num_rotated, call.num_parts):
            for i in range(size):
                out[t, h, i] = widened(heads[t, h, i])


@inlined
def _silu_mul_rows(address: int, begin: int, end: int, tag: Any) -> None:
    call = _call_at(address)
    size = call.size
    gate_up = carray(_pointer(call.a, tag), (call.num_rows, 2 * size))
    out = carray(_pointer(call.b, tag), (call.num_rows, size))
    for t in range(begin, end):
        _silu_mul_row(gate_up[t, :size], gate_up[t, size:], out[t])


@inlined
def _compute_rows(address: int, begin: int, end: int, tag: Any) -> None:
    kind = _call_at(address).kind
    if kind == _ADD_NORM:
        _add_norm_rows(address, begin, end, tag)
    elif kind == _ROTATE:
        _rotate_rows(address, begin, end, tag)
    else:
        _silu_mul_rows(address, begin, end, tag)


def _compute_chunks(address: int, tag: Any) -> None:
    """Take chunks of the rows of the call at an address until none is left: what each thread runs."""
    num_rows = _call_at(address).num_rows
    begin = fetch_and_add(address + _NEXT_ROW, _CHUNK_ROWS)
    while begin < num_rows:
        _compute_rows(address, begin, min(begin + _CHUNK_ROWS, num_rows), tag)
        begin = fetch_and_add(address + _NEXT_ROW, _CHUNK_ROWS)


@compiled_short
def _begin(
    address: int, kind: int, a: int, b: int, c: int, d: int, num_rows: int, num_parts: int, num_rotated: int, size: int,
    eps: Any, tag: Any,
) -> bool:  # fmt: skip
    """Write a call to an address, and compute it here if it has few elements; returns whether it did."""
    call = _call_at(address)
    call.kind, call.a, call.b, call.c, call.d = kind, a, b, c, d
    call.next_row, call.num_rows, call.num_parts, call.num_rotated = 0, num_rows, num_parts, num_rotated
    call.size, call.eps = size, eps
    if num_rows * num_parts * size >= _SERIAL_ELEMENTS:
        return False
    _compute_rows(address, 0, num_rows, tag)
    return True


# ---- calls


class CpuElementwise:
    """The decoder's elementwise operations on contiguous tensors, T tokens first. One thread alone may use it.

    The residual stream, norm weights, cos and sin are float32. Products' inputs and results are float32 or have the
    dtype named when it is made, float32 or bfloat16; those of one call have one dtype. What it needs is compiled, or
    loaded from the cache, when it is made.
    """

    def __init__(self, product_dtype: torch.dtype = torch.float32) -> None:
        self._record = np.zeros(1, _CALL)
        self._address = self._record.ctypes.data
        self._bodies = {dtype: c_function(_compute_chunks, 1, _TAGS[dtype]) for dtype in {torch.float32, product_dtype}}
        row = torch.ones(1, 2)
        for dtype in self._bodies:
            self.silu_mul(row.to(dtype), torch.ones(1, 1, dtype=dtype))

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight; all [T, H], weight [H]."""
        num_rows, size = residual.shape
        assert residual.dtype is weight.dtype is torch.float32
        assert residual.numel() == delta.numel() == out.numel()
        assert weight.numel() == size
        self._run(_ADD_NORM, (delta, out), (residual, delta, weight, out), (num_rows, 1, 0, size), float(eps))

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return heads [T, heads, D] as float32 in new memory, the first `num_rotated` of them rotated.

        Channel i is paired with i + D / 2; cos and sin are [T, D / 2].
        """
        num_rows, num_heads, size = heads.shape
        assert cos.dtype is sin.dtype is torch.float32
        assert cos.numel() == sin.numel() == num_rows * (size // 2)
        assert num_rotated <= num_heads
        out = torch.empty_like(heads, dtype=torch.float32)
        self._run(_ROTATE, (heads,), (heads, cos, sin, out), (num_rows, num_heads, num_rotated, size))
        return out

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up for gate_up [T, 2 I], gate first; out [T, I]."""
        num_rows, size = out.shape
        assert gate_up.numel() == 2 * out.numel()
        self._run(_SILU_MUL, (gate_up, out), (gate_up, out), (num_rows, 2, 0, size))

    def _run(
        self, kind: int, products: tuple[Tensor, ...], tensors: tuple[Tensor, ...], sizes: tuple[int, int, int, int],
        eps: float = 0.0,
    ) -> None:  # fmt: skip
        """Run a call of these rows, parts of a row, rotated parts and elements of a part.

        `products` are those of its tensors that go into matrix products or come out of them.
        """
        dtype = products[0].dtype
        assert dtype in self._bodies, f"nothing is compiled for {dtype}"
        assert products[-1].dtype is dtype
        assert all(tensor.is_contiguous() for tensor in tensors), "rows are found by their number alone"
        a, b, *others = [tensor.data_ptr() for tensor in tensors]
        c, d = others or (0, 0)
        if not _begin(self._address, kind, a, b, c, d, *sizes, eps, _TAGS[dtype]):
            run_on_threads(self._bodies[dtype], self._address, torch.get_num_threads())
