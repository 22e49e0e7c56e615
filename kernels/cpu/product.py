"""The one inner loop of attention: a few rows of a product, with all sums in registers.

    c[r, 0:lanes] = (c[r, 0:lanes] if accumulate else 0) + sum over k of a[r, k] * b[k, 0:lanes]

Scores are queries times channel-major keys; outputs are probabilities times token-major values. For each element the
sum runs over k in order, one fused multiply-add a step, whatever the number of rows or lanes: so a query's result does
not depend on which other queries were computed beside it, nor on whether b was a block or a float32 copy of one.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.runtime import HOST_FEATURES, inlined, instruction, literal_instruction
from kernels.cpu.vector import FLOAT32, ITEM_BYTES, LANES, declare, emit_fma, emit_load, emit_splat, emit_store

# Rows at once where there are many: 6 rows of 16 floats fill 12 of AVX2's 16 registers; AVX-512 has twice as many, each
# twice as wide.
PANEL_ROWS = 12 if "avx512f" in HOST_FEATURES else 6
BLOCK_ROWS = 6
WIDE_ROWS = 3  # that may be 32 lanes wide: as many sums, in half the calls

_INDEX = ir.IntType(64)


@literal_instruction
def rows_product(
    _typing: Any, rows: Any, lanes: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
    depth: Any, accumulate: Any, ahead: Any, tag: Any,
) -> Any:  # fmt: skip
    """rows_product(rows, lanes, c, c_stride, a, a_stride, b, b_stride, depth, accumulate, ahead, tag): see above.

    `rows` is a literal, or a number from 1 to BLOCK_ROWS (WIDE_ROWS for 32 lanes); `lanes` is a literal. c, a, b are
    addresses, strides are bytes from row to row; c and a are float32, b has the tag's dtype. Step k asks for the k-th
    `lanes` elements at the address `ahead` to be brought near; None: for nothing.
    """
    literal = isinstance(rows, types.IntegerLiteral)
    kinds = [rows if literal else types.int64, lanes, *[types.int64] * 7, types.boolean, types.int64, tag]
    if ahead is types.none:
        kinds[10] = types.none

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        operands = [*args[2:10], args[8] if ahead is types.none else args[10]]
        most = WIDE_ROWS if lanes.literal_value > LANES else BLOCK_ROWS
        for count in [rows.literal_value] if literal else range(1, most + 1):
            function = _product_function(builder, count, lanes.literal_value, tag, ahead is not types.none)
            if literal:
                builder.call(function, operands)
            else:
                with builder.if_then(builder.icmp_signed("==", args[0], _INDEX(count))):
                    builder.call(function, operands)
        return context.get_dummy_value()

    return types.void(*kinds), emit


def _product_function(builder: Any, rows: int, lanes: int, tag: Any, prefetches: bool) -> Any:
    """Return the module's function for such a product. It is called, not absorbed: one copy, compiled once."""
    kind = ir.FunctionType(ir.VoidType(), [*[_INDEX] * 7, ir.IntType(1), _INDEX])
    name = f"quire_product_{rows}x{lanes}_{tag}{'_ahead' if prefetches else ''}"
    function = declare(builder, kind, name)
    if not function.blocks:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block("entry"))
        operands = [*function.args[:-1], function.args[-1] if prefetches else None]
        _emit_product(body, rows, lanes, tag, operands)
        body.ret_void()
    return function


def _emit_product(builder: Any, rows: int, lanes: int, tag: Any, operands: list[Any]) -> None:
    c, c_stride, a, a_stride, b, b_stride, depth, accumulate, ahead = operands
    vector = ir.VectorType(ir.FloatType(), lanes)
    c_rows = [builder.add(c, builder.mul(c_stride, _INDEX(r))) for r in range(rows)]
    a_rows = [builder.add(a, builder.mul(a_stride, _INDEX(r))) for r in range(rows)]
    sums = [builder.alloca(vector) for _ in range(rows)]
    for c_row, total in zip(c_rows, sums, strict=True):
        old = emit_load(builder, c_row, types.float32, lanes)
        builder.store(builder.select(accumulate, old, ir.Constant(vector, [0.0] * lanes)), total)
    with cgutils.for_range(builder, depth) as loop:
        if ahead is not None:
            emit_prefetch(builder, builder.add(ahead, builder.mul(loop.index, _INDEX(lanes * ITEM_BYTES[tag]))))
        line = emit_load(builder, builder.add(b, builder.mul(loop.index, b_stride)), tag, lanes)
        column = builder.mul(loop.index, _INDEX(4))
        for a_row, total in zip(a_rows, sums, strict=True):
            factor = emit_splat(builder, emit_load(builder, builder.add(a_row, column), types.float32, 1), lanes)
            builder.store(emit_fma(builder, factor, line, builder.load(total)), total)
    for c_row, total in zip(c_rows, sums, strict=True):
        emit_store(builder, c_row, builder.load(total))


def emit_prefetch(builder: Any, address: Any) -> None:
    """Emit a request to bring a line into the first cache, to be read."""
    number, byte_pointer = ir.IntType(32), ir.PointerType(ir.IntType(8))
    function = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
    prefetch = declare(builder, function, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, byte_pointer), number(0), number(3), number(1)])


@instruction
def prefetch(_typing: Any, address: Any) -> Any:
    """prefetch(address): ask for a line to be brought near."""

    def emit(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@inlined
def block_product(
    rows: int, lanes: int, c: int, c_stride: int, a: int, a_stride: int, b: int, b_stride: int, depth: int,
    accumulate: bool, ahead: int, tag: Any,
) -> None:  # fmt: skip
    """rows_product for any number of rows, over 8 or 16 lanes of a block, or 32 for up to WIDE_ROWS rows."""
    first = 0
    while first < rows:
        # 7 and 8 rows go as 4 + 3 and 4 + 4: either half has sums enough to hide the latency of a multiply-add.
        count = min(rows - first, BLOCK_ROWS if rows - first <= BLOCK_ROWS or rows - first > 8 else 4)
        ci, ai = c + first * c_stride, a + first * a_stride
        if lanes == 2 * LANES:
            rows_product(count, 32, ci, c_stride, ai, a_stride, b, b_stride, depth, accumulate, ahead, tag)
        elif lanes == LANES:
            rows_product(count, 16, ci, c_stride, ai, a_stride, b, b_stride, depth, accumulate, ahead, tag)
        else:
            rows_product(count, 8, ci, c_stride, ai, a_stride, b, b_stride, depth, accumulate, ahead, tag)
        first += count


@inlined
def panel_product(
    rows: int, c: int, c_stride: int, a: int, a_stride: int, b: int, depth: int, accumulate: bool
) -> None:
    """rows_product for a multiple of PANEL_ROWS rows by a panel, which is float32 [depth, 16], contiguous."""
    for r in range(0, rows, PANEL_ROWS):
        ci, ai = c + r * c_stride, a + r * a_stride
        rows_product(PANEL_ROWS, LANES, ci, c_stride, ai, a_stride, b, LANES * 4, depth, accumulate, None, FLOAT32)
