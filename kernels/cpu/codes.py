"""What becomes of numbers on their way to codes: rounding to one side, and stores of 8-bit codes.

`kernels.quantize` has the formulas in plain torch; here each step is an instruction on vectors or single floats.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from kernels.cpu.runtime import inlined, instruction, literal_instruction
from kernels.cpu.vector import LANES, add, constant, emit_store, splat, subtract, widen
from kernels.formats import Encoding
from kernels.quantize import LARGEST_FLOAT8, LARGEST_FLOAT16, LEVELS

_FLOAT, _INT, _SHORT, _BYTE, _HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.HalfType()
_TO_INTEGER = np.float32(12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer, which is then in the lowest bits
_TO_INTEGER_BITS = 0x4B400000


@instruction
def codes_in_byte(_typing: Any, tag: Any) -> Any:
    """codes_in_byte(tag): 2 for UINT4, 1 for the others."""
    return types.int64(tag), lambda _c, _b, sig, _a: ir.Constant(
        ir.IntType(64), 2 if sig.args[0] == types.uint32 else 1
    )


@instruction
def are_floats(_typing: Any, tag: Any) -> Any:
    """are_floats(tag): whether codes are floats, which have no minimum."""
    return types.boolean(tag), lambda _c, _b, sig, _a: ir.Constant(ir.IntType(1), int(sig.args[0] == types.int8))


@instruction
def levels(_typing: Any, tag: Any) -> Any:
    """levels(tag): the largest code, or the number that it stands for."""
    largest = {types.uint8: LEVELS[Encoding.UINT8], types.int8: LARGEST_FLOAT8, types.uint32: LEVELS[Encoding.UINT4]}
    return types.float32(tag), lambda _c, _b, sig, _a: ir.Constant(_FLOAT, largest[sig.args[0]])


@instruction
def sound(_typing: Any, x: Any) -> Any:
    """sound(x): 0 for NaN, else x clamped to float16's range; there is no zero below zero."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        x, kind = args[0], args[0].type
        largest, least, zero = (constant(kind, n) for n in (LARGEST_FLOAT16, -LARGEST_FLOAT16, 0.0))
        x = builder.select(builder.fcmp_unordered("uno", x, x), zero, x)
        x = builder.select(builder.fcmp_ordered(">", x, largest), largest, x)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)
        return builder.fadd(x, zero)

    return x(x), emit


@instruction
def not_above(_typing: Any, x: Any) -> Any:
    """not_above(x): the largest float16 that is not above x, which lies within float16's range, as float32."""

    def emit(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        x, kind = args[0], args[0].type
        lanes = kind.count if isinstance(kind, ir.VectorType) else 1
        half, bits_type = widen(_HALF, lanes), widen(_SHORT, lanes)
        narrow = builder.fptrunc(x, half)
        nearest, bits = builder.fpext(narrow, kind), builder.bitcast(narrow, bits_type)
        positive = builder.fcmp_ordered(">", nearest, constant(kind, 0.0))
        below = builder.add(bits, builder.select(positive, constant(bits_type, 0xFFFF), constant(bits_type, 1)))
        is_zero = builder.fcmp_ordered("==", nearest, constant(kind, 0.0))
        below = builder.select(is_zero, constant(bits_type, 0x8001), below)  # the smallest below zero
        lower = builder.fpext(builder.bitcast(below, half), kind)
        return builder.select(builder.fcmp_ordered(">", nearest, x), lower, nearest)

    return x(x), emit


@inlined
def rounded(x: Any) -> Any:
    """Return a vector, from 0 to 2 ** 22, rounded to integers, ties to even."""
    return subtract(add(x, splat(_TO_INTEGER)), splat(_TO_INTEGER))


@literal_instruction
def store_codes(_typing: Any, address: Any, x: Any, tag: Any, lanes: Any) -> Any:
    """store_codes(address, vector, tag, lanes): the first 8 or 16 lanes as bytes.

    Numbers are integers for UINT8, and for FLOAT8 within 448, to be rounded to nearest even.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = widen(_INT, LANES)
        code = builder.fptosi(args[1], bits) if sig.args[2] == types.uint8 else _emit_float8_code(builder, args[1])
        narrow = builder.trunc(code, widen(_BYTE, LANES))
        if lanes.literal_value < LANES:
            first = ir.Constant(ir.VectorType(_INT, lanes.literal_value), list(range(lanes.literal_value)))
            narrow = builder.shuffle_vector(narrow, narrow, first)
        emit_store(builder, args[0], narrow)
        return context.get_dummy_value()

    return types.void(types.int64, x, tag, lanes), emit


def _emit_float8_code(builder: Any, x: Any) -> Any:
    kind, bits_type = x.type, widen(_INT, LANES)
    bits = builder.bitcast(x, bits_type)
    magnitude_bits = builder.and_(bits, constant(bits_type, 0x7FFFFFFF))
    magnitude = builder.bitcast(magnitude_bits, kind)
    # From 2 ** -6 on: 3 bits of mantissa are kept of 23, and the exponent's bias falls from 127 to 7.
    odd = builder.and_(builder.lshr(magnitude_bits, constant(bits_type, 20)), constant(bits_type, 1))
    carried = builder.add(magnitude_bits, builder.add(odd, constant(bits_type, 0x7FFFF)))
    normal = builder.sub(builder.lshr(carried, constant(bits_type, 20)), constant(bits_type, (127 - 7) << 3))
    # Below: multiples of 2 ** -9.
    steps = builder.fadd(builder.fmul(magnitude, constant(kind, 512.0)), constant(kind, float(_TO_INTEGER)))
    small = builder.sub(builder.bitcast(steps, bits_type), constant(bits_type, _TO_INTEGER_BITS))
    is_small = builder.fcmp_ordered("<", magnitude, constant(kind, 2.0**-6))
    sign = builder.and_(builder.lshr(bits, constant(bits_type, 24)), constant(bits_type, 128))
    return builder.or_(builder.select(is_small, small, normal), sign)
