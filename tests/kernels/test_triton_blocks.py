"""Triton's writing, copying and clearing of blocks, in the interpreter: its blocks lie as the reference's do."""

from collections.abc import Sequence

import pytest
import torch

from kernels.dispatch import AttentionParams, Backend, backend_for
from kernels.errors import UnsupportedShapeError
from kernels.formats import Format, KVLayout, entry
from tests.interpreted import import_interpreted
from tests.kernels.cases import attention, blocks_of, entries, filled_arena, make_case, noise_arena
from tests.kernels.test_requantize import CHAINS, LAYOUTS, NARROW, arena_of, odd_rows, only

pytest.importorskip("triton", reason="Triton is for Linux")
backend_module = import_interpreted("kernels.triton.backend")
pytestmark = pytest.mark.usefixtures("interpreting")

LAYOUT = KVLayout(num_kv_heads=2, head_size=80, block_size=16, native_dtype="bfloat16", slab_blocks=4)


@pytest.fixture(scope="module")
def triton() -> Backend:
    backend: Backend = backend_module.TritonBackend("cpu", backend_module.Chip("cuda", 90))
    return backend


@pytest.mark.parametrize(
    ("native_dtype", "dtype"),
    [
        ("float32", torch.float32),
        ("float16", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 8), (96, 32), (256, 16)])
def test_written_blocks_are_the_reference_s(
    triton: Backend, reference: Backend, head_size: int, block_size: int, native_dtype: str, dtype: torch.dtype
) -> None:
    case = make_case(
        [(40, 1), (9, 1)], num_kv_heads=3, group=1, head_size=head_size, block_size=block_size,
        native_dtype=native_dtype, dtype=dtype,
    )  # fmt: skip
    assert torch.equal(filled_arena(triton, case), filled_arena(reference, case))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e-40])
def test_numbers_that_are_hard_to_round_stay(triton: Backend, number: float) -> None:
    case = make_case([(1, 1)], num_kv_heads=1, group=1, dtype=torch.bfloat16)
    case.value.fill_(number)
    values = filled_arena(triton, case).view(torch.bfloat16)
    assert (values.view(torch.int16) == case.value.view(torch.int16)[0, 0, 0]).sum() >= 64


def test_strided_keys_and_values(triton: Backend) -> None:
    case = make_case([(40, 1)])
    tokens, heads, size = case.key.shape
    fused = torch.zeros(tokens, 3 * heads, size)
    fused[:, :heads], fused[:, 2 * heads :] = case.key, case.value
    arena = torch.full((case.num_slabs, case.layout.slab_bytes), 0xFF, dtype=torch.uint8)
    triton.write_kv(arena, fused[:, :heads], fused[:, 2 * heads :], case.slots, case.layout)
    assert torch.equal(arena, filled_arena(triton, case))


def test_writing_no_token(triton: Backend) -> None:
    arena = noise_arena(LAYOUT, 1)[0]
    before, nothing = arena.clone(), torch.empty(0, 2, 80)
    triton.write_kv(arena, nothing, nothing, torch.empty(0, dtype=torch.int64), LAYOUT)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("slot", [-1, -(1 << 40), 3 * 256 * 16, 4 * 16, 1 << 40])
def test_slot_outside_the_arena_is_skipped(triton: Backend, slot: int) -> None:
    arena = noise_arena(LAYOUT, 1)[0]
    tokens = torch.zeros(2, 2, 80)
    wanted = arena.clone()
    triton.write_kv(wanted, tokens[1:], tokens[1:], torch.tensor([20]), LAYOUT)
    triton.write_kv(arena, tokens, tokens, torch.tensor([slot, 20]), LAYOUT)
    assert torch.equal(arena, wanted)


def test_copy_copies_every_layer_and_nothing_else(triton: Backend) -> None:
    arena = noise_arena(LAYOUT)
    wanted = blocks_of(arena, LAYOUT).clone()
    wanted[:, 2, 1], wanted[:, 0, 3] = wanted[:, 0, 0], wanted[:, 1, 2]
    triton.copy_blocks(arena, entries(0, 256 + 2), entries(512 + 1, 3), LAYOUT)
    assert torch.equal(blocks_of(arena, LAYOUT), wanted)


def test_zero_clears_every_layer_and_nothing_else(triton: Backend) -> None:
    arena = noise_arena(LAYOUT)
    wanted = blocks_of(arena, LAYOUT).clone()
    wanted[:, 2, 3], wanted[:, 0, 0] = 0, 0
    triton.zero_blocks(arena, entries(512 + 3, 0), LAYOUT)
    assert torch.equal(blocks_of(arena, LAYOUT), wanted)


@pytest.mark.parametrize("fmt", Format)
def test_copying_and_clearing_blocks_of_every_format(triton: Backend, fmt: Format) -> None:
    layout = KVLayout(2, 256, 16, "bfloat16", slab_blocks=4)  # blocks of several chunks
    arena, size = noise_arena(layout), layout.block_bytes(fmt)
    wanted = arena.clone()
    wanted[:, 2, size : 2 * size] = wanted[:, 0, 2 * size : 3 * size]
    source, target = only(2, fmt), only(512 + 1, fmt)
    triton.copy_blocks(arena, source, target, layout)
    assert torch.equal(arena, wanted)
    wanted[:, 2, size : 2 * size] = 0
    triton.zero_blocks(arena, target, layout)
    assert torch.equal(arena, wanted)


@pytest.mark.parametrize("formats", [*((fmt,) for fmt in NARROW), *CHAINS], ids=str)
def test_narrower_blocks_are_the_reference_s(triton: Backend, reference: Backend, formats: Sequence[Format]) -> None:
    for layout in LAYOUTS:
        x, arenas = odd_rows(layout), []
        for backend in (triton, reference):
            arenas.append(arena_of(reference, x, x.flip(0), layout))
            source = only(0, Format.NATIVE)
            for slab_idx, fmt in enumerate(formats, start=1):
                target = only(slab_idx * 256 + 1, fmt)
                backend.requantize_blocks(arenas[-1], source, target, layout)
                source = target
        assert torch.equal(*arenas), layout


def test_narrowing_several_blocks_of_all_layers(triton: Backend, reference: Backend) -> None:
    layout = LAYOUTS[2]  # of float16, for of bfloat16 the interpreter takes numbers below 2^-126 for zero
    arena = noise_arena(layout, num_slabs=4)
    first = torch.tensor([entry(block_id, Format.NATIVE) for block_id in (0, 2, 1)], dtype=torch.int32)
    second = torch.tensor(
        [entry(256 + 3, Format.INT8), entry(512, Format.INT4), entry(768 + 1, Format.FP8)], dtype=torch.int32
    )
    third = torch.tensor([entry(256 + 1, Format.K8V4)], dtype=torch.int32)
    wanted = arena.clone()
    for backend, written in ((triton, arena), (reference, wanted)):
        backend.requantize_blocks(written, first, second, layout)
        backend.requantize_blocks(written, second[2:], third, layout)
    assert torch.equal(arena, wanted)


def test_what_cannot_be_narrowed_is_skipped(triton: Backend) -> None:
    arena = noise_arena(LAYOUT)
    before = arena.clone()
    pairs = [
        (entry(1, Format.NATIVE), entry(2, Format.NATIVE)),
        (entry(256, Format.INT8), entry(257, Format.INT8)),
        (entry(256, Format.INT4), entry(258, Format.INT8)),
        (entry(1, Format.NATIVE), entry(256 + LAYOUT.blocks_per_slab(Format.INT8), Format.INT8)),
        (entry(1, Format.NATIVE), entry(3 * 256, Format.INT8)),
        (entry(1, Format.NATIVE), entry(259, Format.INT8) - (1 << 31)),
        (entry(1, Format.NATIVE), 256 * 8 + 5),
        (entry(LAYOUT.slab_blocks, Format.NATIVE), entry(260, Format.INT8)),
        (-8, entry(261, Format.INT8)),
    ]
    sources, targets = torch.tensor(pairs, dtype=torch.int32).T.contiguous()
    triton.requantize_blocks(arena, sources, targets, LAYOUT)
    assert torch.equal(arena, before)


def test_copy_to_another_format_is_skipped(triton: Backend) -> None:
    arena = noise_arena(LAYOUT)
    before = arena.clone()
    triton.copy_blocks(arena, entries(1), only(256, Format.INT8), LAYOUT)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("bad", [8 * 4, 8 * 3 * 256, 8 * 256 + 5, 8 * LAYOUT.blocks_per_slab(Format.INT4) + 4, -8])
def test_bad_entries_are_skipped(triton: Backend, bad: int) -> None:
    arena = noise_arena(LAYOUT)
    before, bad_entry = blocks_of(arena, LAYOUT).clone(), torch.tensor([bad], dtype=torch.int32)
    good_entry = entries(1) | (bad_entry & 7)
    triton.copy_blocks(arena, good_entry, bad_entry, LAYOUT)
    triton.copy_blocks(arena, bad_entry, good_entry, LAYOUT)
    triton.zero_blocks(arena, bad_entry, LAYOUT)
    assert torch.equal(blocks_of(arena, LAYOUT), before)


def test_no_entries(triton: Backend) -> None:
    arena = noise_arena(LAYOUT)
    before = arena.clone()
    triton.copy_blocks(arena, entries(), entries(), LAYOUT)
    triton.requantize_blocks(arena, entries(), entries(), LAYOUT)
    triton.zero_blocks(arena, entries(), LAYOUT)
    assert torch.equal(arena, before)


def test_warm_up_launches_every_kernel(triton: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("write", "copy", "zero", "requantize", "prefill", "decode", "merge")
    launched: list[str] = []
    for name in names:
        kernel = getattr(backend_module, f"{name}_kernel")
        hooks = [*kernel.pre_run_hooks, lambda *args, name=name, **kwargs: launched.append(name)]
        monkeypatch.setattr(kernel, "pre_run_hooks", hooks)
    layout = KVLayout(2, 64, 16, "float32")
    triton.warm_up(layout, 6, AttentionParams(0.125))
    assert set(launched) == {*names} - {"requantize"}
    triton.warm_up(layout, 6, AttentionParams(0.125), [Format.NATIVE, Format.INT4])
    assert set(launched) == {*names}


def test_attention_without_tokens_or_rows(triton: Backend) -> None:
    case = make_case([(70, 3)], native_dtype="float32")
    assert attention(triton, case, rows=[(70, 0)]).shape[0] == 0


def test_backend_of_gpus() -> None:
    backend = backend_for(torch.device("cuda"))
    assert isinstance(backend, backend_module.TritonBackend)
    assert backend_for(torch.device("cuda", 1)) is backend


def test_unsupported_shapes_name_what_is_wrong(triton: Backend) -> None:
    params, one = AttentionParams(0.1), torch.zeros(1, dtype=torch.int64)
    arena = noise_arena(LAYOUT)[0]

    def warm_up(layout: KVLayout, num_heads: int = 2, params: AttentionParams = params) -> None:
        triton.warm_up(layout, num_heads, params)

    with pytest.raises(UnsupportedShapeError, match="head size 72"):
        warm_up(KVLayout(1, 72, 16, "float32"))
    with pytest.raises(UnsupportedShapeError, match="head size 512"):
        warm_up(KVLayout(1, 512, 16, "float32"))
    with pytest.raises(UnsupportedShapeError, match="block size 4"):
        warm_up(KVLayout(1, 64, 4, "float32"))
    with pytest.raises(UnsupportedShapeError, match="3 query heads"):
        warm_up(LAYOUT, 3)
    with pytest.raises(UnsupportedShapeError, match="sliding_window is 0"):
        warm_up(LAYOUT, 2, AttentionParams(0.1, sliding_window=0))
    with pytest.raises(UnsupportedShapeError, match="scale is 0"):
        warm_up(LAYOUT, 2, AttentionParams(0.0))
    key = torch.zeros(1, 2, 80)
    with pytest.raises(UnsupportedShapeError, match="float64"):
        triton.write_kv(arena, key.double(), key.double(), one, LAYOUT)
    with pytest.raises(UnsupportedShapeError, match=r"\[1, 1, 80\]"):
        triton.write_kv(arena, key[:, :1], key[:, :1], one, LAYOUT)
    with pytest.raises(UnsupportedShapeError, match="slot_mapping"):
        triton.write_kv(arena, key, key, one.int(), LAYOUT)
    with pytest.raises(UnsupportedShapeError, match="stride of 90"):
        triton.write_kv(arena, torch.zeros(1, 2, 90)[:, :, :80], key, one, LAYOUT)
    with pytest.raises(UnsupportedShapeError, match="arena"):
        triton.write_kv(arena[:, 16:], key, key, one, LAYOUT)
    shifted = torch.zeros(arena.numel() + 1, dtype=torch.uint8)[1:].view(arena.shape)
    with pytest.raises(UnsupportedShapeError, match="aligned"):
        triton.write_kv(shifted, key, key, one, LAYOUT)
    batch = make_case([(40, 1)]).batch()
    with pytest.raises(UnsupportedShapeError, match="query is"):
        triton.paged_attention(torch.zeros(1, 4, 32), arena, batch, params, LAYOUT, torch.zeros(1, 4, 80))
