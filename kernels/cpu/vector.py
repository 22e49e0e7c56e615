"""Vectors of 16 floats for Numba: loads and stores of every KV dtype, arithmetic, exp2; records and work queues.

LLVM cuts a vector into what the CPU has (two AVX2 registers, one AVX-512 register, four of NEON), so kernels are
written once. Nothing is left to auto-vectorization, which would order sums as it likes. Addresses are plain integers.

A dtype in memory is told by the type of a tag argument, so that it is part of a kernel's signature. Arithmetic takes
vectors or single floats alike, and rounds them alike.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from kernels.cpu.runtime import instruction

LANES = 16

BFLOAT16 = np.uint16(0)
FLOAT16 = np.int16(0)
FLOAT32 = np.float32(0)
# Codes, which are loaded as float32 numbers. Two of UINT4 share a byte: `load_upper` gives the upper half's.
UINT8 = np.uint8(0)
FLOAT8 = np.int8(0)  # e4m3fn, loaded as 1 / FLOAT8_FACTOR of the number: what a float16 with the same bits would be
UINT4 = np.uint32(0)
FLOAT8_FACTOR = 256.0
ITEM_BYTES: dict[Any, int] = {
    types.uint16: 2, types.int16: 2, types.float32: 4, types.uint8: 1, types.int8: 1, types.uint32: 1
}  # fmt: skip

_FLOAT, _INT, _SHORT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_STORED: dict[Any, ir.Type] = {
    types.uint16: _SHORT, types.int16: ir.HalfType(), types.float32: _FLOAT,
    types.uint8: _BYTE, types.int8: _BYTE, types.uint32: _BYTE,
}  # fmt: skip


class Float32x16(types.Type):
    """Numba's type of a vector; it lives in registers and never reaches Python."""


_describe: Any = models.PrimitiveModel.__init__  # has no annotations


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        _describe(self, manager, numba_type, ir.VectorType(_FLOAT, LANES))


_new_type: Any = Float32x16  # Numba's constructor has no annotations
float32x16 = _new_type("Float32x16")


# ---- what other emitters of instructions use


def widen(element: ir.Type, lanes: int) -> ir.Type:
    """Return the type of `lanes` elements: the element itself when there is one."""
    return element if lanes == 1 else ir.VectorType(element, lanes)


def constant(like: ir.Type, number: float) -> ir.Constant:
    """Return a number as a constant of a scalar type, or in every lane of a vector type."""
    return ir.Constant(like, [number] * like.count if isinstance(like, ir.VectorType) else number)


def emit_load(builder: Any, address: Any, tag: Any, lanes: int, *, upper: bool = False) -> Any:
    """Emit a load of `lanes` elements of the tag's dtype, widened to float32; `upper` is for UINT4."""
    stored = widen(_STORED[tag], lanes)
    value = builder.load(builder.inttoptr(address, stored.as_pointer()), align=ITEM_BYTES[tag], typ=stored)
    return _emit_widened(builder, value, tag, lanes, upper=upper)


def _emit_widened(builder: Any, value: Any, tag: Any, lanes: int, *, upper: bool = False) -> Any:
    """Emit the conversion of the tag's dtype to float32."""
    if tag == types.int16:
        return builder.fpext(value, widen(_FLOAT, lanes))
    if tag == types.uint16:  # a bfloat16 is the upper half of a float32
        bits = widen(_INT, lanes)
        return builder.bitcast(builder.shl(builder.zext(value, bits), constant(bits, 16)), widen(_FLOAT, lanes))
    if tag == types.int8:
        return _emit_float8(builder, value, lanes)
    if tag == types.uint8 or tag == types.uint32:
        bits = widen(_INT, lanes)
        code = builder.zext(value, bits)
        if tag == types.uint32:
            code = builder.lshr(code, constant(bits, 4)) if upper else builder.and_(code, constant(bits, 15))
        return builder.sitofp(code, widen(_FLOAT, lanes))
    return value


def _emit_float8(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a float8's sign, exponent and mantissa as a float16, whose exponent has one bit more, widened to float32."""
    bits = widen(_SHORT, lanes)
    spread = builder.shl(builder.sext(value, bits), constant(bits, 7))
    half = builder.bitcast(builder.and_(spread, constant(bits, 0xBFFF)), widen(ir.HalfType(), lanes))
    return builder.fpext(half, widen(_FLOAT, lanes))


def emit_store(builder: Any, address: Any, value: Any) -> None:
    """Emit a store of a scalar or a vector, whatever the address's alignment."""
    element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
    align = 4 if element in (_FLOAT, _INT) else 1 if element == _BYTE else 2
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c with one rounding."""
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    function = ir.FunctionType(a.type, [a.type] * 3)
    return builder.call(declare(builder, function, f"llvm.fma.{suffix}"), [a, b, c])


def declare(builder: Any, kind: ir.FunctionType, name: str) -> Any:
    """Return the function of a name, declared in the builder's module at its first use."""
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def emit_splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a vector with the scalar in every lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT, lanes), [0] * lanes))


# ---- memory


@instruction
def load(_typing: Any, address: Any, tag: Any) -> Any:
    """load(address, tag): 16 elements, widened."""
    return float32x16(address, tag), lambda _c, builder, sig, args: emit_load(builder, args[0], sig.args[1], LANES)


@instruction
def load_scalar(_typing: Any, address: Any, tag: Any) -> Any:
    """load_scalar(address, tag): one element, widened."""
    return types.float32(address, tag), lambda _c, builder, sig, args: emit_load(builder, args[0], sig.args[1], 1)


@instruction
def widened(_typing: Any, x: Any) -> Any:
    """widened(x): an element of an array of float32, or of bfloat16 as uint16, as a float."""
    return types.float32(x), lambda _c, builder, sig, args: _emit_widened(builder, args[0], sig.args[0], 1)


@instruction
def narrowed(_typing: Any, x: Any, tag: Any) -> Any:
    """narrowed(x, tag): what `widened` takes, rounded from a float to the tag's dtype."""
    return tag(types.float32, tag), lambda _c, builder, sig, args: _emit_narrow(builder, args[0], sig.args[1])


@instruction
def load_upper(_typing: Any, address: Any, tag: Any) -> Any:
    """load_upper(address, tag): 16 codes of the upper halves of bytes."""
    return float32x16(address, tag), lambda _c, builder, sig, args: emit_load(
        builder, args[0], sig.args[1], LANES, upper=True
    )


@instruction
def load_upper_scalar(_typing: Any, address: Any, tag: Any) -> Any:
    """load_upper_scalar(address, tag): the code of a byte's upper half."""
    return types.float32(address, tag), lambda _c, builder, sig, args: emit_load(
        builder, args[0], sig.args[1], 1, upper=True
    )


@instruction
def store(_typing: Any, address: Any, value: Any, tag: Any) -> Any:
    """store(address, value, tag): a vector or a float, rounded to the tag's dtype."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_store(builder, args[0], _emit_narrow(builder, args[1], sig.args[2]))
        return context.get_dummy_value()

    return types.void(address, value, tag), emit


@instruction
def scatter(_typing: Any, address: Any, stride: Any, value: Any, tag: Any) -> Any:
    """scatter(address, stride, vector, tag): each lane, rounded, `stride` bytes after the one before."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow = _emit_narrow(builder, args[2], sig.args[3])
        for lane in range(LANES):
            offset = builder.mul(args[1], ir.Constant(args[1].type, lane))
            emit_store(builder, builder.add(args[0], offset), builder.extract_element(narrow, _INT(lane)))
        return context.get_dummy_value()

    return types.void(address, stride, value, tag), emit


@instruction
def item_bytes(_typing: Any, tag: Any) -> Any:
    """item_bytes(tag): bytes of one element in memory."""
    return types.int64(tag), lambda _c, _b, sig, _a: ir.Constant(ir.IntType(64), ITEM_BYTES[sig.args[0]])


def _emit_narrow(builder: Any, value: Any, tag: Any) -> Any:
    """Emit the conversion to the tag's dtype, rounding to nearest even; NaN stays NaN."""
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else 1
    if tag == types.int16:
        return builder.fptrunc(value, widen(ir.HalfType(), lanes))
    if tag == types.float32:
        return value
    bits_type = widen(_INT, lanes)
    bits = builder.bitcast(value, bits_type)
    odd = builder.and_(builder.lshr(bits, constant(bits_type, 16)), constant(bits_type, 1))
    rounded = builder.add(bits, builder.add(odd, constant(bits_type, 0x7FFF)))
    quiet = builder.or_(bits, constant(bits_type, 0x400000))  # rounding could carry a NaN over to zero
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(bits_type, 16)), widen(ir.IntType(16), lanes))


@instruction
def load_int32(_typing: Any, array: Any, index: Any) -> Any:
    """load_int32(array, index): an element of the int32 array at an address, as int64."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        address = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 4)))
        return builder.sext(builder.load(builder.inttoptr(address, _INT.as_pointer()), typ=_INT), args[0].type)

    return types.int64(types.int64, types.int64), emit


@instruction
def load_int64(_typing: Any, array: Any, index: Any) -> Any:
    """load_int64(array, index): an element of the int64 array at an address."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        address = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
        return builder.load(builder.inttoptr(address, args[0].type.as_pointer()), typ=args[0].type)

    return types.int64(types.int64, types.int64), emit


def record_at(dtype: np.dtype[np.void]) -> Any:
    """Make the instruction that takes an address and returns the record there, of a numpy structured dtype.

    Kernels hand each other addresses: a record's type spells out all its fields, which would swell every symbol.
    """
    record = numba.from_dtype(dtype)

    @instruction
    def at(_typing: Any, address: Any) -> Any:
        return record(types.int64), lambda context, builder, _s, args: builder.inttoptr(
            args[0], context.get_value_type(record)
        )

    return at


def offset_of(dtype: np.dtype[np.void], name: str) -> int:
    """Return where a field of a record lies, in bytes from its begin."""
    assert dtype.fields is not None
    return int(dtype.fields[name][1])


# ---- arithmetic


@instruction
def splat(_typing: Any, x: Any) -> Any:
    """splat(x): the float in every lane."""
    return float32x16(types.float32), lambda _c, builder, _s, args: emit_splat(builder, args[0], LANES)


@instruction
def add(_typing: Any, a: Any, b: Any) -> Any:
    """add(a, b): a + b."""
    return a(a, a), lambda _c, builder, _s, args: builder.fadd(*args)


@instruction
def subtract(_typing: Any, a: Any, b: Any) -> Any:
    """subtract(a, b): a - b."""
    return a(a, a), lambda _c, builder, _s, args: builder.fsub(*args)


@instruction
def multiply(_typing: Any, a: Any, b: Any) -> Any:
    """multiply(a, b): a * b."""
    return a(a, a), lambda _c, builder, _s, args: builder.fmul(*args)


@instruction
def divide(_typing: Any, a: Any, b: Any) -> Any:
    """divide(a, b): a / b."""
    return a(a, a), lambda _c, builder, _s, args: builder.fdiv(*args)


@instruction
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """fma(a, b, c): a * b + c with one rounding."""
    return a(a, a, a), lambda _c, builder, _s, args: emit_fma(builder, *args)


@instruction
def maximum(_typing: Any, a: Any, b: Any) -> Any:
    """maximum(a, b): the larger; b where either is NaN."""
    return a(a, a), lambda _c, builder, _s, args: _emit_maximum(builder, *args)


@instruction
def minimum(_typing: Any, a: Any, b: Any) -> Any:
    """minimum(a, b): the smaller; b where either is NaN."""
    return a(a, a), lambda _c, builder, _s, args: builder.select(builder.fcmp_ordered("<", *args), *args)


@instruction
def negative_magnitude(_typing: Any, x: Any) -> Any:
    """negative_magnitude(x): -|x|."""
    return x(x), lambda _c, builder, _s, args: _emit_sign(builder, "or_", args[0], 1 << 31)


@instruction
def with_sign_of(_typing: Any, x: Any, y: Any) -> Any:
    """with_sign_of(x, y): x, at least 0, with the sign of y."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        bits = widen(_INT, LANES)
        sign = builder.and_(builder.bitcast(args[1], bits), constant(bits, 1 << 31))
        return builder.bitcast(builder.or_(builder.bitcast(args[0], bits), sign), args[0].type)

    return x(x, x), emit


@instruction
def inside(_typing: Any, x: Any, first: Any, end: Any, other: Any) -> Any:
    """inside(x, first, end, other): x in lanes first <= lane < end, the float `other` elsewhere, whatever x holds."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        x, first, end, other = args
        index_type = ir.VectorType(first.type, LANES)
        lanes = ir.Constant(index_type, list(range(LANES)))
        from_first = builder.icmp_signed(">=", lanes, emit_splat(builder, first, LANES))
        before_end = builder.icmp_signed("<", lanes, emit_splat(builder, end, LANES))
        return builder.select(builder.and_(from_first, before_end), x, emit_splat(builder, other, LANES))

    return x(x, types.int32, types.int32, types.float32), emit


@instruction
def largest_lane(_typing: Any, x: Any) -> Any:
    """largest_lane(x): the largest of the 16."""
    return types.float32(x), lambda _c, builder, _s, args: _emit_tree(builder, args[0], _emit_maximum)


@instruction
def smallest_lane(_typing: Any, x: Any) -> Any:
    """smallest_lane(x): the smallest of the 16."""

    def smaller(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", a, b), a, b)

    return types.float32(x), lambda _c, builder, _s, args: _emit_tree(builder, args[0], smaller)


@instruction
def sum_of_lanes(_typing: Any, x: Any) -> Any:
    """sum_of_lanes(x): the sum of the 16, by halves."""
    return types.float32(x), lambda _c, builder, _s, args: _emit_tree(builder, args[0], lambda b, u, v: b.fadd(u, v))


@instruction
def exp2_of_negative(_typing: Any, x: Any) -> Any:
    """exp2_of_negative(x): 2 ** x for x <= 0 to 2e-7 relative; 0 below -125; NaN for NaN."""
    return x(x), lambda _c, builder, _s, args: _emit_exp2(builder, args[0])


# 2 ** f on [-0.5, 0.5], highest power first: the coefficients of exp2f in Cephes (S. Moshier).
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
         6.931472028550421e-1, 1.0)  # fmt: skip
_TO_INTEGER = 12582912.0  # 1.5 * 2 ** 23: adding it rounds to an integer, which is then in the lowest bits


def _emit_exp2(builder: Any, x: Any) -> Any:
    kind = x.type
    bits = ir.VectorType(_INT, kind.count) if isinstance(kind, ir.VectorType) else _INT
    shifted = builder.fadd(x, constant(kind, _TO_INTEGER))
    fraction = builder.fsub(x, builder.fsub(shifted, constant(kind, _TO_INTEGER)))
    value = constant(kind, _EXP2[0])
    for coefficient in _EXP2[1:]:
        value = emit_fma(builder, value, fraction, constant(kind, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, bits), constant(bits, 23))
    power = builder.bitcast(builder.add(exponent, constant(bits, 127 << 23)), kind)
    tiny = builder.fcmp_ordered("<", x, constant(kind, -125.0))
    return builder.select(tiny, constant(kind, 0.0), builder.fmul(value, power))


def _emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_sign(builder: Any, operation: str, x: Any, mask: int) -> Any:
    bits = ir.VectorType(_INT, x.type.count)
    return builder.bitcast(getattr(builder, operation)(builder.bitcast(x, bits), constant(bits, mask)), x.type)


def _emit_tree(builder: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Emit the combination of all lanes: upper half with lower half, until one is left."""
    lanes = LANES
    while lanes > 1:
        lanes //= 2
        lower, upper = (
            ir.Constant(ir.VectorType(_INT, lanes), [start + i for i in range(lanes)]) for start in (0, lanes)
        )
        x = combine(builder, builder.shuffle_vector(x, x, lower), builder.shuffle_vector(x, x, upper))
    return builder.extract_element(x, _INT(0))


# ---- threads


@instruction
def call(_typing: Any, function: Any, launch: Any, thread: Any) -> Any:
    """call(function, launch, thread): call the C function at an address with two addresses."""

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [args[1].type, args[2].type])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@instruction
def fetch_and_add(_typing: Any, address: Any, amount: Any) -> Any:
    """fetch_and_add(address, amount): the int64 there, which grows by `amount` in the same instant.

    What a thread wrote before, any thread that sees the new number can read.
    """

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], args[1].type.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), emit
