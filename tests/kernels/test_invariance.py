"""A query's output is the same to the last bit, whatever it was computed beside."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import AttentionParams, Backend
from tests.kernels.cases import MIXED_ROWS, attention, filled_arena, make_case

PARAMS = [AttentionParams(0.125), AttentionParams(0.125, sliding_window=90), AttentionParams(0.2, soft_cap=8.0)]


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("native_dtype", ["bfloat16", "float16", "float32"])
def test_row_alone_and_in_a_batch(cpu: Backend, native_dtype: str, params: AttentionParams) -> None:
    case = make_case([*MIXED_ROWS, (1500, 1), (900, 300)], group=3, native_dtype=native_dtype)
    arena = filled_arena(cpu, case)
    together = attention(cpu, case, params, arena=arena)
    begins = itertools.accumulate((query_len for _, query_len in case.rows), initial=0)
    for row, (begin, (_, query_len)) in enumerate(zip(begins, case.rows, strict=False)):
        alone = attention(cpu, case.only_row(row), params, arena=arena)
        assert torch.equal(alone, together[begin : begin + query_len]), f"row {row}"


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prompt_in_one_chunk_in_many_and_token_by_token(
    cpu: Backend, block_size: int, group: int, params: AttentionParams
) -> None:
    length = 531
    case = make_case([(length, length)], num_kv_heads=1, group=group, block_size=block_size)
    arena = filled_arena(cpu, case)
    whole = attention(cpu, case, params, arena=arena)
    for chunk in (1, 33, 128):
        ends = [min(begin + chunk, length) for begin in range(0, length, chunk)]
        rows = [(end, end - begin) for begin, end in itertools.pairwise([0, *ends])]
        parts = [attention(cpu, case, params, rows=[row], arena=arena) for row in rows]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {chunk}"


def test_any_number_of_threads(cpu: Backend, num_threads: int) -> None:
    case = make_case([(3000, 1), (40, 1), (1000, 300), (600, 5)], group=3)
    arena = filled_arena(cpu, case)
    outs = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        outs.append(attention(cpu, case, arena=arena))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_same_launch_again(cpu: Backend) -> None:
    case = make_case(group=3)
    arena = filled_arena(cpu, case)
    assert torch.equal(attention(cpu, case, arena=arena), attention(cpu, case, arena=arena))
