"""The inner loop of attention over codes: as `product`, with both halves of a head's channels at once.

    keys      c[r, :] = (c[r, :] if accumulate else 0)
                        + sum over k of a[r, k] * b[k, :] + sum over k of a[r, half + k] * b[half + k, :]
    values    c[r, :] += sum over k of a[r, k] * b[k, :]        c[r, half:] += sum over k of a[r, k] * b[k, half:]

Codes become float32 in registers, where UINT4 gives a line of either half from one byte; scales are the caller's. Two
sums a row hide the latency of multiply-adds, and the order of each is fixed.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.product import emit_prefetch
from kernels.cpu.runtime import HOST_FEATURES, inlined, literal_instruction
from kernels.cpu.vector import LANES, declare, emit_fma, emit_load, emit_splat, emit_store

CODE_ROWS = 4 if "avx512f" in HOST_FEATURES else 2  # at once: two sums each, and two lines
# Rows of values that may be 32 lanes wide: as many sums as registers allow, in half the calls.
WIDE_CODE_ROWS = 3 if "avx512f" in HOST_FEATURES else 0

_INDEX = ir.IntType(64)


def _kinds(lanes: Any, tag: Any) -> list[Any]:
    return [types.int64, lanes, *[types.int64] * 7, types.boolean, *[types.int64] * 4, tag]


@literal_instruction
def _key_product(
    _typing: Any, rows: Any, lanes: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
    depth: Any, accumulate: Any, upper: Any, other: Any, ahead: Any, ahead_stride: Any, tag: Any,
) -> Any:  # fmt: skip
    """See above; `other` is from a[0] to a[half]."""
    return types.void(*_kinds(lanes, tag)), _emitter(lanes, tag, "keys")


@literal_instruction
def _value_product(
    _typing: Any, rows: Any, lanes: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
    depth: Any, accumulate: Any, upper: Any, other: Any, ahead: Any, ahead_stride: Any, tag: Any,
) -> Any:  # fmt: skip
    """See above; `other` is from c[0] to c[half]."""
    return types.void(*_kinds(lanes, tag)), _emitter(lanes, tag, "values")


def _emitter(lanes: Any, tag: Any, side: str) -> Any:
    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        most = {8: 1, 16: CODE_ROWS, 32: WIDE_CODE_ROWS}[lanes.literal_value]
        for count in range(1, most + 1):
            function = _product_function(builder, count, lanes.literal_value, tag, side)
            with builder.if_then(builder.icmp_signed("==", args[0], _INDEX(count))):
                builder.call(function, args[2:14])
        return context.get_dummy_value()

    return emit


def _product_function(builder: Any, rows: int, lanes: int, tag: Any, side: str) -> Any:
    """Return the module's function for such a product. It is called, not absorbed: one copy, compiled once."""
    kind = ir.FunctionType(ir.VoidType(), [*[_INDEX] * 7, ir.IntType(1), *[_INDEX] * 4])
    function = declare(builder, kind, f"quire_codes_{rows}x{lanes}_{tag}_{side}")
    if not function.blocks:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block("entry"))
        _emit_product(body, rows, lanes, tag, side, list(function.args))
        body.ret_void()
    return function


def _emit_product(builder: Any, rows: int, lanes: int, tag: Any, side: str, operands: list[Any]) -> None:
    c, c_stride, a, a_stride, b, b_stride, depth, accumulate, upper, other, ahead, ahead_stride = operands
    vector, is_key = ir.VectorType(ir.FloatType(), lanes), side == "keys"
    zero = ir.Constant(vector, [0.0] * lanes)
    sums = [(builder.alloca(vector), builder.alloca(vector)) for _ in range(rows)]
    c_rows = [builder.add(c, builder.mul(c_stride, _INDEX(r))) for r in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_stride, _INDEX(r))) for r in range(rows)]
    for c_row, (lower_sum, upper_sum) in zip(c_rows, sums, strict=True):
        old = emit_load(builder, c_row, types.float32, lanes)
        builder.store(builder.select(accumulate, old, zero), lower_sum)
        builder.store(
            zero if is_key else emit_load(builder, builder.add(c_row, other), types.float32, lanes), upper_sum
        )
    with cgutils.for_range(builder, depth) as loop:
        emit_prefetch(builder, builder.add(ahead, builder.mul(loop.index, ahead_stride)))
        line = builder.add(b, builder.mul(loop.index, b_stride))
        lower_line = emit_load(builder, line, tag, lanes)
        upper_at = line if tag == types.uint32 else builder.add(line, upper)  # UINT4's are in the same bytes
        upper_line = emit_load(builder, upper_at, tag, lanes, upper=True)
        for a_row, (lower_sum, upper_sum) in zip(a_rows, sums, strict=True):
            factor_at = builder.add(a_row, builder.mul(loop.index, _INDEX(4)))
            factor = emit_splat(builder, emit_load(builder, factor_at, types.float32, 1), lanes)
            builder.store(emit_fma(builder, factor, lower_line, builder.load(lower_sum)), lower_sum)
            if is_key:
                upper_factor = emit_load(builder, builder.add(factor_at, other), types.float32, 1)
                factor = emit_splat(builder, upper_factor, lanes)
            builder.store(emit_fma(builder, factor, upper_line, builder.load(upper_sum)), upper_sum)
    for c_row, (lower_sum, upper_sum) in zip(c_rows, sums, strict=True):
        if is_key:
            emit_store(builder, c_row, builder.fadd(builder.load(lower_sum), builder.load(upper_sum)))
        else:
            emit_store(builder, c_row, builder.load(lower_sum))
            emit_store(builder, builder.add(c_row, other), builder.load(upper_sum))


@inlined
def _rows_at_once(rows: int, lanes: int) -> int:
    """Return how many of the rows that are left to take: an even cut, but one by one for 8 lanes, which are rare."""
    if lanes < LANES:
        return 1
    return rows if rows <= CODE_ROWS else (rows + 1) // 2 if rows < 2 * CODE_ROWS else CODE_ROWS


@inlined
def key_product(
    rows: int, lanes: int, c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, half: int,
    accumulate: bool, upper: int, ahead: int, ahead_stride: int, tag: Any,
) -> None:  # fmt: skip
    """Multiply any number of rows by the keys of 8 or 16 tokens of a head.

    c, a and b are addresses; strides and `upper`, from the codes of channel 0 to those of channel `half`, are bytes; c
    and a are float32, b has the tag's codes. Step k asks for the line at `ahead + k * ahead_stride` to be brought near.
    """
    first = 0
    while first < rows:
        count = _rows_at_once(rows - first, lanes)
        ci, ai, other = c + first * c_stride, a + first * a_stride, 4 * half
        if lanes == LANES:
            _key_product(
                count, 16, ci, c_stride, ai, a_stride, b, b_stride, half, accumulate, upper, other, ahead,
                ahead_stride, tag,
            )  # fmt: skip
        else:
            _key_product(
                count, 8, ci, c_stride, ai, a_stride, b, b_stride, half, accumulate, upper, other, ahead,
                ahead_stride, tag,
            )  # fmt: skip
        first += count


@inlined
def value_product(
    rows: int, lanes: int, c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, tokens: int,
    half: int, upper: int, ahead: int, ahead_stride: int, tag: Any,
) -> None:  # fmt: skip
    """Add the values of 8 or 16 channels, and of as many `half` channels on, times a, to any number of rows c.

    Arguments are as of key_product. Up to WIDE_CODE_ROWS rows may be 32 channels wide.
    """
    first = 0
    while first < rows:
        count = _rows_at_once(rows - first, lanes)
        ci, ai, other = c + first * c_stride, a + first * a_stride, 4 * half
        if lanes == 2 * LANES:
            _value_product(
                count, 32, ci, c_stride, ai, a_stride, b, b_stride, tokens, True, upper, other, ahead,
                ahead_stride, tag,
            )  # fmt: skip
        elif lanes == LANES:
            _value_product(
                count, 16, ci, c_stride, ai, a_stride, b, b_stride, tokens, True, upper, other, ahead,
                ahead_stride, tag,
            )  # fmt: skip
        else:
            _value_product(
                count, 8, ci, c_stride, ai, a_stride, b, b_stride, tokens, True, upper, other, ahead,
                ahead_stride, tag,
            )  # fmt: skip
        first += count
