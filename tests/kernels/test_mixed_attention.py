"""Attention over tables in which blocks of one row have different formats."""

import itertools
from collections.abc import Callable

import pytest
import torch

from kernels.cpu.backend import CpuBackend, _Attention
from kernels.dispatch import AttentionParams, Backend
from kernels.formats import Format, KVLayout
from kernels.reference import attend
from tests.kernels.cases import (
    MIXED_ROWS,
    OUT_TOLERANCE,
    Case,
    Row,
    attention,
    by_age,
    demoted,
    filled_arena,
    in_disorder,
    make_case,
    plain_params,
)
from tests.kernels.formula import Array, dequantized, quantized

Choice = Callable[[int, int], Format]


def kept(x: torch.Tensor, layout: KVLayout, side: str) -> torch.Tensor:
    """Return what a row's blocks keep of float32 [tokens, num_kv_heads, head_size], heads first."""
    x = x.to(getattr(torch, layout.native_dtype)).float().transpose(0, 1).contiguous()
    for b in range(x.shape[1] // layout.block_size):
        fmt, tokens = in_disorder(0, b), slice(b * layout.block_size, (b + 1) * layout.block_size)
        if fmt is not Format.NATIVE:
            block: Array = x[:, tokens].contiguous().numpy()
            x[:, tokens] = torch.from_numpy(dequantized(quantized(block, side, fmt), side, fmt))
    return x


@pytest.mark.parametrize("native_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_reference_reads_what_the_formula_wrote(reference: Backend, block_size: int, native_dtype: str) -> None:
    case = make_case([(201, 30)], block_size=block_size, native_dtype=native_dtype)
    mixed, arena = demoted(reference, case, in_disorder)
    params = AttentionParams(0.125, sliding_window=150)
    wanted = attend(case.queries(), kept(case.key, case.layout, "key"), kept(case.value, case.layout, "value"), params)
    torch.testing.assert_close(attention(reference, mixed, params, arena=arena), wanted, rtol=0, atol=1e-6)


def test_int8_comes_close_to_native(reference: Backend) -> None:
    case = make_case([(300, 1)])
    mixed, arena = demoted(reference, case, lambda _row, _block: Format.INT8)
    native = attention(reference, case, plain_params(case), arena=filled_arena(reference, case))
    torch.testing.assert_close(attention(reference, mixed, arena=arena), native, rtol=0, atol=0.01)


def assert_matches(cpu: Backend, reference: Backend, case: Case, choose: Choice, params: AttentionParams) -> None:
    (mixed, arena), (plain, plain_arena) = demoted(cpu, case, choose), demoted(reference, case, choose)
    wanted = attention(reference, plain, params, arena=plain_arena)
    out = attention(cpu, mixed, params, arena=arena)
    torch.testing.assert_close(out, wanted, rtol=0, atol=OUT_TOLERANCE[out.dtype])


@pytest.mark.parametrize("fmt", list(Format)[1:])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 8), (96, 16), (128, 32), (128, 16), (256, 64)])
def test_one_format(cpu: Backend, reference: Backend, head_size: int, block_size: int, fmt: Format) -> None:
    case = make_case(head_size=head_size, block_size=block_size)
    assert_matches(cpu, reference, case, lambda _row, _block: fmt, plain_params(case))


@pytest.mark.parametrize("native_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("choose", [by_age, in_disorder])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 8), (128, 32)])
def test_formats_in_one_table(
    cpu: Backend, reference: Backend, head_size: int, block_size: int, choose: Choice, native_dtype: str
) -> None:
    case = make_case(head_size=head_size, block_size=block_size, native_dtype=native_dtype)
    assert_matches(cpu, reference, case, choose, plain_params(case))


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sliding_window", [None, 1, 50])
@pytest.mark.parametrize("group", range(1, 10))
def test_groups_windows_and_caps(
    cpu: Backend, reference: Backend, group: int, sliding_window: int | None, soft_cap: float | None
) -> None:
    case = make_case(group=group, num_kv_heads=3 if group < 4 else 1, seed=group)
    assert_matches(cpu, reference, case, in_disorder, AttentionParams(0.3, sliding_window, soft_cap))


@pytest.mark.parametrize("rows", [[(4100, 1)], [(3000, 70)], [(1, 1)] * 40 + [(2500, 1)]])
def test_long_contexts(cpu: Backend, reference: Backend, rows: list[Row]) -> None:
    case = make_case(rows, num_kv_heads=2, group=3)
    assert_matches(cpu, reference, case, by_age, plain_params(case))


def test_row_alone_and_in_a_batch(cpu: Backend) -> None:
    case = make_case([*MIXED_ROWS, (1500, 1), (900, 300)], group=3)
    mixed, arena = demoted(cpu, case, in_disorder)
    together = attention(cpu, mixed, arena=arena)
    begins = itertools.accumulate((query_len for _, query_len in case.rows), initial=0)
    for row, (begin, (_, query_len)) in enumerate(zip(begins, case.rows, strict=False)):
        alone = attention(cpu, mixed.only_row(row), arena=arena)
        assert torch.equal(alone, together[begin : begin + query_len]), f"row {row}"


def test_prompt_in_chunks(cpu: Backend) -> None:
    length = 531
    mixed, arena = demoted(cpu, make_case([(length, length)], group=3), in_disorder)
    whole = attention(cpu, mixed, arena=arena)
    ends = [*range(64, length, 64), length]
    rows = [(end, end - begin) for begin, end in itertools.pairwise([0, *ends])]
    parts = [attention(cpu, mixed, rows=[row], arena=arena) for row in rows]
    assert torch.equal(torch.cat(parts), whole)


def test_native_rows_are_the_same_beside_others(cpu: Backend) -> None:
    case = make_case([(500, 1), (500, 1), (200, 50)])
    wanted = attention(cpu, case)
    mixed, arena = demoted(cpu, case, lambda row, _block: Format.INT4 if row == 1 else Format.NATIVE)
    out = attention(cpu, mixed, arena=arena)
    assert torch.equal(out[0], wanted[0])
    assert torch.equal(out[2:], wanted[2:])
    assert not torch.equal(out[1], wanted[1])


def test_first_block_of_another_format_may_come_without_warm_up(reference: Backend) -> None:
    case = make_case([(100, 1), (90, 20)])
    assert_matches(CpuBackend(), reference, case, in_disorder, plain_params(case))


def test_warm_up_for_formats_leaves_nothing_to_compile(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(100, 1), (90, 20)])
    fresh = CpuBackend()
    fresh.warm_up(case.layout, 4, plain_params(case), [Format.NATIVE, Format.INT8])
    mixed, arena = demoted(cpu, case, in_disorder)
    wanted = attention(cpu, mixed, arena=arena)
    monkeypatch.setattr(_Attention, "compile_mixed", None)
    assert torch.equal(attention(fresh, mixed, arena=arena), wanted)
