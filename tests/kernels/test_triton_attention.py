"""Triton's attention in the interpreter, against the reference.

The interpreter's product of bfloat16 is garbage, so products of bfloat16 blocks are computed in float32 here. And it
takes milliseconds a token to write: the reference, whose blocks lie alike, fills the arenas.
"""

import importlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.dispatch import AttentionParams, Backend
from kernels.formats import PLACES_PER_SLAB, Format, block_of, entry
from kernels.reference import ReferenceBackend
from tests.interpreted import import_interpreted
from tests.kernels import cases
from tests.kernels.cases import Case, Row, by_age, demoted, filled_arena, in_disorder, make_case, plain_params
from tests.kernels.pairwise import pairwise

pytest.importorskip("triton", reason="Triton is for Linux")
backend_module = import_interpreted("kernels.triton.backend")
InterpreterBuilder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
pytestmark = pytest.mark.usefixtures("interpreting")

# Products in float16 round each weight to 11 bits before it meets a value of up to 4.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-5, "float16": 4e-3}
BATCHES: dict[str, Sequence[Row]] = {
    "decodes": [(1, 1), (130, 1), (64, 1)],
    "chunks": [(17, 17), (130, 33), (9, 2)],
    "mixed": [(70, 1), (100, 40), (128, 1), (40, 0), (66, 3)],
    "split decode": [(272, 1)],
}
FACTORS: dict[str, Sequence[Any]] = {
    "batch": list(BATCHES),
    "head_size": [64, 80, 96, 128, 256],
    "block_size": [16, 8, 32],
    "native_dtype": ["float32", "float16", "bfloat16"],
    "group": [1, 2, 3, 4, 5, 6, 7, 8],
    "num_kv_heads": [1, 2],
    "sliding_window": [None, 1, 50, 200],
    "soft_cap": [None, 2.0, 50.0],
    "chip": [("cuda", 90), ("cuda", 80), ("hip", "gfx942")],
}
MIXED_FACTORS: dict[str, Sequence[Any]] = {
    "order": ["by_age", "in_disorder", *Format],
    "batch": [[(70, 1), (1, 1), (128, 1)], [(130, 33), (9, 2), (40, 0)], [(290, 1)]],
    "head_size": [64, 80, 128],
    "block_size": [16, 8, 32],
    "native_dtype": ["float32", "float16", "bfloat16"],
    "group": [1, 3, 4],
    "sliding_window": [None, 1, 50],
    "soft_cap": [None, 2.0],
    "chip": [("cuda", 90), ("cuda", 80), ("hip", "gfx942")],
}


@pytest.fixture(scope="module")
def triton() -> Backend:
    return backend_on(("cuda", 90))


def backend_on(chip: tuple[str, int | str], formats: Collection[Format] = ()) -> Backend:
    """Return a backend as after it was warmed up for the formats, which would take seconds here."""
    dtypes = {**backend_module.TRITON_DTYPES, "bfloat16": backend_module.TRITON_DTYPES["float32"]}
    backend: Backend = backend_module.TritonBackend("cpu", backend_module.Chip(*chip), dtypes, formats)
    return backend


def attention(
    backend: Backend,
    case: Case,
    params: AttentionParams | None = None,
    rows: Sequence[Row] | None = None,
    arena: Tensor | None = None,
) -> Tensor:
    """Return the backend's attention of the case, by default on blocks that the reference filled."""
    return cases.attention(
        backend, case, params, rows, filled_arena(ReferenceBackend(), case) if arena is None else arena
    )


def assert_matches(
    triton: Backend, reference: Backend, case: Case, params: AttentionParams | None = None, tolerance: float = 0.0
) -> None:
    arena = filled_arena(reference, case)
    wanted = attention(reference, case, params, arena=arena)
    tolerance = tolerance or TOLERANCE[case.layout.native_dtype]
    torch.testing.assert_close(attention(triton, case, params, arena=arena), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("factors", pairwise(FACTORS), ids=lambda factors: "-".join(map(str, factors.values())))
def test_every_pair_of_factors(reference: Backend, factors: dict[str, Any]) -> None:
    case = make_case(
        BATCHES[factors["batch"]], num_kv_heads=factors["num_kv_heads"], group=factors["group"],
        head_size=factors["head_size"], block_size=factors["block_size"], native_dtype=factors["native_dtype"],
    )  # fmt: skip
    params = AttentionParams(0.2, factors["sliding_window"], factors["soft_cap"])
    assert_matches(backend_on(factors["chip"]), reference, case, params)


@pytest.mark.parametrize("factors", pairwise(MIXED_FACTORS), ids=lambda factors: "-".join(map(str, factors.values())))
def test_every_pair_of_factors_with_other_formats(reference: Backend, factors: dict[str, Any]) -> None:
    case = make_case(
        factors["batch"], num_kv_heads=2, group=factors["group"], head_size=factors["head_size"],
        block_size=factors["block_size"], native_dtype=factors["native_dtype"],
    )  # fmt: skip
    params = AttentionParams(0.2, factors["sliding_window"], factors["soft_cap"])
    assert_mixed_matches(reference, case, factors["order"], params, factors["chip"])


def only_format(fmt: Format, _row: int, _block: int) -> Format:
    return fmt


def assert_mixed_matches(
    reference: Backend, case: Case, order: str | Format, params: AttentionParams, chip: tuple[str, int | str]
) -> None:
    """Attend to blocks in an order of formats, or all full ones in one format, with a backend that knows no others."""
    orders = {"by_age": by_age, "in_disorder": in_disorder}
    choose = orders[order] if isinstance(order, str) else partial(only_format, order)
    mixed, arena = demoted(reference, case, choose)
    wanted = attention(reference, mixed, params, arena=arena)
    formats = tuple(Format) if isinstance(order, str) else (order,)
    out = attention(backend_on(chip, formats), mixed, params, arena=arena)
    torch.testing.assert_close(out, wanted, rtol=0, atol=TOLERANCE[case.layout.native_dtype])


@pytest.mark.parametrize(
    ("rows", "order", "native_dtype", "shape"),
    [
        ([(2100, 1)], "by_age", "float32", (64, 16)),
        ([(400, 50)], "in_disorder", "float16", (64, 16)),
        ([(200, 1), (130, 20)], "in_disorder", "float32", (256, 64)),  # blocks longer than tiles
    ],
)
def test_long_contexts_and_blocks_of_other_formats(
    reference: Backend, rows: Sequence[Row], order: str, native_dtype: str, shape: tuple[int, int]
) -> None:
    case = make_case(rows, num_kv_heads=1, group=3, head_size=shape[0], block_size=shape[1], native_dtype=native_dtype)
    assert_mixed_matches(reference, case, order, plain_params(case), ("cuda", 90))


def test_small_values_keep_their_bits_in_float16(reference: Backend) -> None:
    case = make_case([(250, 1)], num_kv_heads=1, group=1, native_dtype="float16")
    case.value.mul_(1e-3)
    for fmt in (Format.INT8, Format.FP8, Format.INT4):
        mixed, arena = demoted(reference, case, partial(only_format, fmt))
        wanted = attention(reference, mixed, arena=arena)
        out = attention(backend_on(("cuda", 90), [fmt]), mixed, arena=arena)
        torch.testing.assert_close(out, wanted, rtol=0, atol=5e-7)


def test_row_of_several_formats_alone_in_a_batch_and_in_chunks(reference: Backend) -> None:
    backend = backend_on(("cuda", 90), list(Format))
    case = make_case([(70, 1), (300, 1), (130, 130)], num_kv_heads=1, group=3, native_dtype="float32")
    mixed, arena = demoted(reference, case, in_disorder)
    together = attention(backend, mixed, arena=arena)
    assert torch.equal(attention(backend, mixed.only_row(1), arena=arena), together[1:2])
    prompt = mixed.only_row(2)
    parts = [attention(backend, prompt, rows=[row], arena=arena) for row in ((67, 67), (130, 63))]
    assert torch.equal(torch.cat(parts), together[2:])


@pytest.mark.parametrize("code", [Format.INT4, 7])
@pytest.mark.parametrize("query_len", [1, 9])
def test_blocks_of_formats_that_are_not_served_are_left_out(reference: Backend, query_len: int, code: int) -> None:
    backend = backend_on(("cuda", 90), [Format.INT8])
    case = make_case([(48 + query_len, query_len)], native_dtype="float32")
    mixed, arena = demoted(reference, case, lambda _row, block: Format.INT8 if block == 0 else Format.NATIVE)
    mixed.block_table[0, 1] += code
    shorter = replace(mixed, block_table=mixed.block_table[:, [0, 2, 3]].contiguous())
    outs = []
    for one, row in ((mixed, mixed.rows[0]), (shorter, (32 + query_len, query_len))):
        outs.append(torch.empty_like(mixed.queries()))
        backend.paged_attention(mixed.queries(), arena, one.batch([row]), plain_params(case), case.layout, outs[-1])
    torch.testing.assert_close(*outs, rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("fmt", Format)
def test_decode_reads_each_byte_of_its_blocks_once_and_no_other(
    reference: Backend, fmt: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([(96, 1)], num_kv_heads=2, group=2, native_dtype="float16")
    mixed, arena = demoted(reference, case, partial(only_format, fmt))
    counts = np.zeros(arena.numel(), dtype=np.int64)
    load = InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        first = pointers.data[mask.data].astype(np.int64) - arena.data_ptr()
        inside = first[(first >= 0) & (first < len(counts))]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        np.add.at(counts, (inside[:, None] + np.arange(size)).ravel(), 1)
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    attention(backend_on(("cuda", 90), list(Format)), mixed, arena=arena)
    wanted = np.zeros_like(counts)
    for one in mixed.block_table[0, :6].tolist():
        wanted[case.layout.byte_offset(one) :][: case.layout.block_bytes(fmt)] = 1
    assert (counts == wanted).all()


def test_warm_up_tells_the_formats(triton: Backend, reference: Backend) -> None:
    case = make_case([(70, 1)], num_kv_heads=1, group=1, native_dtype="float32")
    mixed, arena = demoted(reference, case, by_age)
    backend, params = backend_on(("cuda", 90)), plain_params(case)
    wanted = attention(reference, mixed, params, arena=arena)
    backend.warm_up(case.layout, 1, params)
    before = attention(backend, mixed, params, arena=arena)
    backend.warm_up(case.layout, 1, params, list(Format))
    backend.warm_up(case.layout, 1, params)
    torch.testing.assert_close(attention(backend, mixed, params, arena=arena), wanted, rtol=0, atol=2e-5)
    assert not torch.equal(before, wanted)


@pytest.mark.parametrize(
    ("rows", "sliding_window"),
    [
        ([(5000, 1)], None),
        ([(5000, 1)], 3000),
        ([(9000, 1)], None),  # more than 32 splits of the shortest kind
        ([(2100, 40)], None),
        ([(2100, 40)], 1000),
        ([(1500, 1), (40, 3), (1024, 1)], None),
    ],
)
def test_long_contexts(triton: Backend, reference: Backend, rows: Sequence[Row], sliding_window: int | None) -> None:
    case = make_case(rows, num_kv_heads=1, group=3, native_dtype="float32")
    assert_matches(triton, reference, case, AttentionParams(0.125, sliding_window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_narrow_dtypes(triton: Backend, reference: Backend, dtype: torch.dtype) -> None:
    case = make_case([(70, 1), (40, 9)], native_dtype=str(dtype).removeprefix("torch."), dtype=dtype)
    # A bfloat16 out is cut off in the interpreter: one unit in the last place of numbers below 4.
    assert_matches(triton, reference, case, tolerance=2**-6 if dtype == torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("num_heads", [(1, 20), (5, 1)])
def test_many_heads(triton: Backend, reference: Backend, num_heads: tuple[int, int]) -> None:
    num_kv_heads, group = num_heads
    case = make_case([(40, 1), (50, 9)], num_kv_heads=num_kv_heads, group=group, native_dtype="float32")
    assert_matches(triton, reference, case)


def test_rows_without_queries_are_left_out(triton: Backend) -> None:
    case = make_case([(70, 3), (90, 5), (20, 1)], native_dtype="float32")
    rows = [(70, 3), (90, 0), (20, 1)]
    both = attention(triton, case)
    assert torch.equal(attention(triton, case, rows=rows), torch.cat([both[:3], both[8:]]))


@pytest.mark.parametrize("query_len", [1, 2, 70])
def test_padding_row_gets_zeros(triton: Backend, query_len: int) -> None:
    case = make_case([(90, 1), (70, 70)], native_dtype="float32")
    arena = filled_arena(ReferenceBackend(), case)
    padded = attention(triton, case, rows=[(90, 1), (0, query_len)], arena=arena)
    assert torch.equal(padded[1:], torch.zeros(query_len, 4, 64))
    assert torch.equal(padded[:1], attention(triton, case, rows=[(90, 1), (0, 0)], arena=arena))


@pytest.mark.parametrize("params", [AttentionParams(0.125), AttentionParams(0.125, sliding_window=90)])
def test_row_alone_and_in_a_batch(triton: Backend, params: AttentionParams) -> None:
    case = make_case([(70, 1), (100, 40), (600, 1), (66, 3), (1, 1)], group=3, native_dtype="float32")
    arena = filled_arena(ReferenceBackend(), case)
    together = attention(triton, case, params, arena=arena)
    begins = itertools.accumulate((query_len for _, query_len in case.rows), initial=0)
    for row, (begin, (_, query_len)) in enumerate(zip(begins, case.rows, strict=False)):
        alone = attention(triton, case.only_row(row), params, arena=arena)
        assert torch.equal(alone, together[begin : begin + query_len]), f"row {row}"


@pytest.mark.parametrize("params", [AttentionParams(0.125), AttentionParams(0.125, sliding_window=90)])
def test_prompt_in_one_chunk_and_in_many(triton: Backend, params: AttentionParams) -> None:
    length = 201
    case = make_case([(length, length)], num_kv_heads=1, group=3, native_dtype="float32")
    arena = filled_arena(ReferenceBackend(), case)
    whole = attention(triton, case, params, arena=arena)
    ends = [67, 134, length]
    rows = [(end, end - begin) for begin, end in itertools.pairwise([0, *ends])]
    parts = [attention(triton, case, params, rows=[row], arena=arena) for row in rows]
    assert torch.equal(torch.cat(parts), whole)


def test_number_of_slices_changes_nothing(triton: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(1500, 1), (700, 1)], num_kv_heads=1, native_dtype="float32")
    outs = []
    for programs in (1, 4, 1000):
        monkeypatch.setattr(backend_module, "_DECODE_PROGRAMS", programs)
        outs.append(attention(triton, case))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_large_scores_do_not_overflow(triton: Backend, reference: Backend) -> None:
    case = make_case([(90, 1), (90, 9)], native_dtype="float32")
    # Scores of a thousand carry errors of 1e-4, and a probability's relative error is its score's absolute one.
    assert_matches(triton, reference, case, AttentionParams(scale=60.0), tolerance=2e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's word for the infinity that is meant
def test_scores_far_beyond_the_cap(triton: Backend, reference: Backend) -> None:
    case = make_case([(90, 1), (90, 9)], native_dtype="float32")
    assert_matches(triton, reference, case, AttentionParams(scale=60.0, soft_cap=3.0))


def test_nan_in_a_visible_key_shows(triton: Backend) -> None:
    case = make_case([(70, 3), (90, 1)], native_dtype="float32")
    case.key[30] = float("nan")
    out = attention(triton, case)
    assert out[:3].isnan().all()
    assert not out[3:].isnan().any()


def test_query_and_out_in_strided_rows(triton: Backend) -> None:
    case = make_case([(70, 1), (40, 9)], native_dtype="float32")
    query = case.queries()
    tokens, heads, size = query.shape
    wide = torch.zeros(2, tokens, heads + 3, size)
    wide[0, :, :heads] = query
    arena = filled_arena(ReferenceBackend(), case)
    triton.paged_attention(
        wide[0, :, :heads], arena, case.batch(), plain_params(case), case.layout, wide[1, :, 3:]
    )  # fmt: skip
    assert torch.equal(wide[1, :, 3:], attention(triton, case, arena=arena))
    assert torch.equal(wide[1, :, :3], torch.zeros(tokens, 3, size))


def test_entries_before_the_window_are_not_read(triton: Backend) -> None:
    case, params = make_case([(300, 1), (250, 9)], native_dtype="float32"), AttentionParams(0.125, sliding_window=100)
    arena = filled_arena(ReferenceBackend(), case)
    wanted = attention(triton, case, params, arena=arena)
    used = {block_of(e) for e in case.block_table.flatten().tolist()}
    places = itertools.product(range(case.num_slabs), range(case.layout.slab_blocks))
    free = next(id for slab_idx, place in places if (id := slab_idx * PLACES_PER_SLAB + place) not in used)
    nan_entry = entry(free, Format.NATIVE)  # a block that nothing was written to
    case.block_table[0, : (300 - 100) // 16] = nan_entry
    case.block_table[1, : (250 - 9 + 1 - 100) // 16] = nan_entry
    assert torch.equal(attention(triton, case, params, arena=arena), wanted)


@pytest.mark.parametrize("bad", [-8, 5, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("rows", [[(70, 1), (90, 1)], [(70, 9), (90, 9)]])
def test_bad_entry_spoils_its_row_alone(triton: Backend, rows: list[Row], bad: int) -> None:
    case = make_case(rows, native_dtype="float32")
    arena = filled_arena(ReferenceBackend(), case)
    wanted, query_len = attention(triton, case, arena=arena), rows[0][1]
    case.block_table[0, 1] = bad
    assert torch.equal(attention(triton, case, arena=arena)[query_len:], wanted[query_len:])


@pytest.mark.parametrize("query_len", [1, 9])
def test_context_beyond_the_block_table_is_cut(triton: Backend, query_len: int) -> None:
    case = make_case([(96, query_len), (96, query_len)], native_dtype="float32")
    case.block_table[:, 6] = case.block_table[:, 0]  # the table holds 7 blocks: 112 tokens
    arena, query = filled_arena(ReferenceBackend(), case), case.queries()
    cut, beyond = torch.empty_like(query), torch.empty_like(query)
    for context_len, out in ((112, cut), (5000, beyond)):
        batch = case.batch([(context_len, query_len), (96, query_len)])
        triton.paged_attention(query, arena, batch, plain_params(case), case.layout, out)
    assert torch.equal(cut, beyond)


def test_batch_is_not_changed(triton: Backend) -> None:
    case = make_case([(70, 1), (40, 9)], native_dtype="float32")
    arena, batch, query = filled_arena(ReferenceBackend(), case), case.batch(), case.queries()
    before = [t.clone() for t in (query, arena, batch.block_table, batch.context_lens, batch.cu_seqlens_q)]
    triton.paged_attention(query, arena, batch, plain_params(case), case.layout, torch.empty_like(query))
    after = (query, arena, batch.block_table, batch.context_lens, batch.cu_seqlens_q)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


class Recorder:
    """Stands in for a kernel, for launches whose tensors have no contents."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("width", "max_query_len", "grids"),
    [
        (16, 1, {"prefill": [], "decode": [(2, 40, 1)], "merge": []}),
        (17, 1, {"prefill": [], "decode": [(2, 40, 2)], "merge": [(8, 40)]}),
        (5000, 9, {"prefill": [(100 // 32 + 40, 2)], "decode": [(2, 40, 32)], "merge": [(8, 40)]}),
    ],
)
def test_launch_depends_on_shapes_alone(
    triton: Backend, monkeypatch: pytest.MonkeyPatch, width: int, max_query_len: int, grids: dict[str, Any]
) -> None:
    recorders = {name: Recorder() for name in grids}
    for name, recorder in recorders.items():
        monkeypatch.setattr(backend_module, f"{name}_kernel", recorder)
    layout = make_case([(1, 1)]).layout

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    query = meta(100, 8, 64, dtype=torch.bfloat16)
    batch = backend_module.AttentionBatch(meta(40, width), meta(40), meta(41), max_query_len)
    arena = meta(9, layout.slab_bytes, dtype=torch.uint8)
    triton.paged_attention(query, arena, batch, AttentionParams(0.125), layout, torch.empty_like(query))
    assert {name: recorder.grids for name, recorder in recorders.items()} == grids
