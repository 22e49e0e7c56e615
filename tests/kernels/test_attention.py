"""The CPU's attention against the reference, over odd shapes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.backend import CpuBackend
from kernels.cpu.blocks import check_entries, copy_entries, fill_write, zero_entries
from kernels.cpu.plan import plan_launch
from kernels.cpu.tiles import lay_out
from kernels.dispatch import AttentionBatch, AttentionParams, Backend, backend_for
from kernels.errors import InvalidBatchError
from kernels.reference import ReferenceBackend, attend
from tests.kernels.cases import OUT_TOLERANCE, Case, Row, attention, filled_arena, make_case, plain_params

HEAD_SIZES = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32)
NATIVE_DTYPES = ("bfloat16", "float16", "float32")


def assert_close(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out, wanted, rtol=0, atol=OUT_TOLERANCE[out.dtype])


def assert_matches(cpu: Backend, reference: Backend, case: Case, params: AttentionParams | None = None) -> None:
    assert_close(attention(cpu, case, params), attention(reference, case, params))


@pytest.mark.parametrize("native_dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_mixed_batch(cpu: Backend, reference: Backend, head_size: int, block_size: int, native_dtype: str) -> None:
    case = make_case(head_size=head_size, block_size=block_size, native_dtype=native_dtype)
    assert_matches(cpu, reference, case)


@pytest.mark.parametrize("soft_cap", [None, 2.0, 50.0])
@pytest.mark.parametrize("sliding_window", [None, 1, 50, 256])
@pytest.mark.parametrize("group", range(1, 9))
def test_groups_windows_and_caps(
    cpu: Backend, reference: Backend, group: int, sliding_window: int | None, soft_cap: float | None
) -> None:
    case = make_case(group=group, num_kv_heads=3 if group < 4 else 1, seed=group)
    assert_matches(cpu, reference, case, AttentionParams(0.3, sliding_window, soft_cap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("native_dtype", NATIVE_DTYPES)
def test_activations_of_every_dtype(cpu: Backend, reference: Backend, native_dtype: str, dtype: torch.dtype) -> None:
    assert_matches(cpu, reference, make_case(native_dtype=native_dtype, dtype=dtype))


@pytest.mark.parametrize("rows", [[(5000, 1)], [(4097, 512)], [(3000, 7)], [(1, 1)] * 40 + [(2500, 1)]])
@pytest.mark.parametrize("sliding_window", [None, 1000])
def test_long_contexts(cpu: Backend, reference: Backend, rows: Sequence[Row], sliding_window: int | None) -> None:
    case = make_case(rows, num_kv_heads=1, group=3)
    assert_matches(cpu, reference, case, AttentionParams(0.125, sliding_window))


@pytest.mark.parametrize("num_heads", [(1, 13), (1, 71), (8, 4)])
def test_many_heads(cpu: Backend, reference: Backend, num_heads: tuple[int, int]) -> None:
    num_kv_heads, group = num_heads
    assert_matches(cpu, reference, make_case([(80, 1), (90, 20)], num_kv_heads=num_kv_heads, group=group))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 150)).map(lambda r: (max(r), min(r))), min_size=1, max_size=6
    ),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 8), st.sampled_from(HEAD_SIZES), st.sampled_from(BLOCK_SIZES)),
    native_dtype=st.sampled_from(NATIVE_DTYPES),
    sliding_window=st.none() | st.integers(1, 300),
    seed=st.integers(0, 1000),
)
def test_any_batch(
    rows: list[Row], shape: tuple[int, int, int, int], native_dtype: str, sliding_window: int | None, seed: int
) -> None:
    num_kv_heads, group, head_size, block_size = shape
    case = make_case(
        rows, num_kv_heads=num_kv_heads, group=group, head_size=head_size, block_size=block_size,
        native_dtype=native_dtype, seed=seed,
    )  # fmt: skip
    params = AttentionParams(head_size**-0.5, sliding_window)
    assert_matches(backend_for(torch.device("cpu")), ReferenceBackend(), case, params)


def test_reference_matches_torch() -> None:
    query, key, value = torch.randn(30, 6, 64), torch.randn(2, 30, 64), torch.randn(2, 30, 64)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), key, value, is_causal=True, enable_gqa=True
    )
    assert_close(attend(query, key, value, AttentionParams(scale=0.125)), wanted.transpose(0, 1))


def test_rows_without_queries_are_left_out(cpu: Backend) -> None:
    case = make_case([(70, 3), (90, 5), (20, 1)])
    rows = [(70, 3), (90, 0), (20, 1)]
    both = attention(cpu, case)
    assert torch.equal(attention(cpu, case, rows=rows), torch.cat([both[:3], both[8:]]))


def test_batch_without_queries(cpu: Backend) -> None:
    case = make_case([(70, 3)])
    assert attention(cpu, case, rows=[(70, 0)]).shape[0] == 0


def test_large_scores_do_not_overflow(cpu: Backend, reference: Backend) -> None:
    case, params = make_case(native_dtype="float32"), AttentionParams(scale=60.0)
    # Scores of a thousand carry errors of 1e-4, and a probability's relative error is its score's absolute one.
    torch.testing.assert_close(attention(cpu, case, params), attention(reference, case, params), rtol=0, atol=2e-3)


def test_nan_in_a_visible_key_shows(cpu: Backend) -> None:
    case = make_case([(70, 3), (90, 1)])
    case.key[30] = float("nan")
    out = attention(cpu, case)
    assert out[:3].isnan().all()
    assert not out[3:].isnan().any()


def test_query_and_out_in_strided_rows(cpu: Backend) -> None:
    case = make_case()
    query = case.queries()
    tokens, heads, size = query.shape
    wide = torch.zeros(2, tokens, heads + 3, size)
    wide[0, :, :heads] = query
    arena = filled_arena(cpu, case)
    cpu.paged_attention(
        wide[0, :, :heads], arena, case.batch(), plain_params(case), case.layout, wide[1, :, 3:]
    )  # fmt: skip
    assert torch.equal(wide[1, :, 3:], attention(cpu, case, arena=arena))
    assert torch.equal(wide[1, :, :3], torch.zeros(tokens, 3, size))


def test_entries_before_the_window_are_not_read(cpu: Backend) -> None:
    case, params = make_case([(600, 1), (700, 30)]), AttentionParams(0.125, sliding_window=100)
    arena = filled_arena(cpu, case)
    wanted = attention(cpu, case, params, arena=arena)
    case.block_table[0, : (600 - 100) // 16] = -1
    case.block_table[1, : (700 - 30 + 1 - 100) // 16] = -1
    assert torch.equal(attention(cpu, case, params, arena=arena), wanted)


@pytest.mark.parametrize("rows", [[(40, 5), (40, 41)], [(40, 5), (81, 5)], [(40, 5), (50, 6)]])
def test_row_that_leads_outside_is_refused(cpu: Backend, rows: list[Row]) -> None:
    case = make_case([(40, 5), (50, 5)])  # its block table has room for 80 tokens a row
    query = case.queries()
    with pytest.raises(InvalidBatchError, match="row 1"):
        cpu.paged_attention(
            query, filled_arena(cpu, case), case.batch(rows), plain_params(case), case.layout, torch.empty_like(query)
        )


def test_more_units_than_there_was_room_for(cpu: Backend, reference: Backend) -> None:
    case = make_case([(2, 2)] * 520, group=1)
    assert_matches(CpuBackend(), reference, case)


def test_warm_up_leaves_nothing_to_compile(cpu: Backend) -> None:
    case = make_case()
    cpu.warm_up(case.layout, 4, plain_params(case))
    functions: list[Any] = [plan_launch, fill_write, lay_out, check_entries, copy_entries, zero_entries]
    attention(cpu, case)
    arena, entries = torch.zeros(2, 1, case.layout.slab_bytes, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    cpu.copy_blocks(arena, entries, entries, case.layout)
    cpu.zero_blocks(arena, entries, case.layout)
    assert [len(function.signatures) for function in functions] == [1] * len(functions)


def test_batch_is_not_changed(cpu: Backend) -> None:
    case = make_case()
    arena, batch = filled_arena(cpu, case), case.batch()
    before = AttentionBatch(batch.block_table.clone(), batch.context_lens.clone(), batch.cu_seqlens_q.clone(), 64)
    query = case.queries()
    kept, kept_arena = query.clone(), arena.clone()
    cpu.paged_attention(query, arena, batch, plain_params(case), case.layout, torch.empty_like(query))
    assert torch.equal(query, kept)
    assert torch.equal(arena, kept_arena)
    assert torch.equal(batch.block_table, before.block_table)
    assert torch.equal(batch.context_lens, before.context_lens)
    assert torch.equal(batch.cu_seqlens_q, before.cu_seqlens_q)
