"""Writing KV, copying and clearing blocks."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.dispatch import AttentionParams, Backend
from kernels.errors import OutOfArenaError, UnsupportedFormatError, UnsupportedShapeError
from kernels.formats import Format, KVLayout, entry
from tests.kernels.cases import attention, blocks_of, entries, filled_arena, make_case, noise_arena

NATIVE_DTYPES = ("bfloat16", "float16", "float32")
LAYOUT = KVLayout(num_kv_heads=2, head_size=64, block_size=16, native_dtype="bfloat16", slab_blocks=4)


@pytest.fixture(params=["cpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.getfixturevalue(request.param)
    return chosen


def only_token(backend: Backend, value: Tensor, native_dtype: str) -> Tensor:
    """Return what attention to a single token gives: its value, rounded to the native dtype."""
    case = make_case([(1, 1)], num_kv_heads=1, group=1, native_dtype=native_dtype)
    case.value.copy_(value)
    return attention(backend, case)


@pytest.mark.parametrize("native_dtype", NATIVE_DTYPES)
def test_values_are_rounded_to_nearest_even(backend: Backend, native_dtype: str) -> None:
    value = torch.randn(1, 1, 64) * torch.logspace(-3, 3, 64)
    value[0, 0, :4] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0])  # halfway between two bfloat16
    wanted = value.to(getattr(torch, native_dtype)).float()
    assert torch.equal(only_token(backend, value, native_dtype), wanted)


@pytest.mark.parametrize("native_dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_stay_so(backend: Backend, native_dtype: str, number: float) -> None:
    value = torch.full((1, 1, 64), number)
    assert torch.equal(only_token(backend, value, native_dtype).nan_to_num(7.0), value.nan_to_num(7.0))


def test_strided_keys_and_values(cpu: Backend) -> None:
    case = make_case([(200, 1)])
    tokens, heads, size = case.key.shape
    fused = torch.zeros(tokens, 3 * heads, size)
    fused[:, :heads], fused[:, 2 * heads :] = case.key, case.value
    arena = torch.full((case.num_slabs, case.layout.slab_bytes), 0xFF, dtype=torch.uint8)
    cpu.write_kv(arena, fused[:, :heads], fused[:, 2 * heads :], case.slots, case.layout)
    assert torch.equal(arena, filled_arena(cpu, case))


def test_a_write_touches_its_slots_alone(cpu: Backend) -> None:
    case = make_case([(200, 1), (50, 1)])
    arena = filled_arena(cpu, case)
    before = attention(cpu, case, arena=arena)
    inside = case.slots[200:]
    cpu.write_kv(arena, case.key[200:] + 1, case.value[200:] + 1, inside, case.layout)
    after = attention(cpu, case, arena=arena)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_writing_no_token(backend: Backend) -> None:
    arena = noise_arena(LAYOUT, 1)[0]
    before, nothing = arena.clone(), torch.empty(0, 2, 64)
    backend.write_kv(arena, nothing, nothing, torch.empty(0, dtype=torch.int64), LAYOUT)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("slot", [-1, 3 * 256 * 16, 4 * 16, 1 << 40])
def test_slot_outside_the_arena_is_refused(backend: Backend, slot: int) -> None:
    arena = noise_arena(LAYOUT, 1)[0]
    token = torch.zeros(1, 2, 64)
    before = arena.clone()
    with pytest.raises(OutOfArenaError):
        backend.write_kv(arena, token, token, torch.tensor([slot]), LAYOUT)
    assert torch.equal(arena, before)


def test_copy_copies_every_layer_and_nothing_else(backend: Backend) -> None:
    arena = noise_arena(LAYOUT)
    wanted = blocks_of(arena, LAYOUT).clone()
    wanted[:, 2, 1], wanted[:, 0, 3] = wanted[:, 0, 0], wanted[:, 1, 2]
    backend.copy_blocks(arena, entries(0, 256 + 2), entries(512 + 1, 3), LAYOUT)
    assert torch.equal(blocks_of(arena, LAYOUT), wanted)


def test_copied_blocks_attend_alike(cpu: Backend) -> None:
    case = make_case([(90, 1)])
    arena = filled_arena(cpu, case)
    wanted = attention(cpu, case, arena=arena)
    used = set(case.block_table[0, :6].tolist())
    places = [slab_idx * 256 + place for slab_idx in range(case.num_slabs) for place in range(5)]
    free = next(e for e in entries(*places).tolist() if e not in used)
    source, target = case.block_table[0, 2:3].clone(), torch.tensor([free], dtype=torch.int32)
    cpu.copy_blocks(arena.unsqueeze(0), source, target, case.layout)
    cpu.zero_blocks(arena.unsqueeze(0), source, case.layout)
    case.block_table[0, 2] = free
    assert torch.equal(attention(cpu, case, arena=arena), wanted)


def test_zero_clears_every_layer_and_nothing_else(backend: Backend) -> None:
    arena = noise_arena(LAYOUT)
    wanted = blocks_of(arena, LAYOUT).clone()
    wanted[:, 2, 3], wanted[:, 0, 0] = 0, 0
    backend.zero_blocks(arena, entries(512 + 3, 0), LAYOUT)
    assert torch.equal(blocks_of(arena, LAYOUT), wanted)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (entry(1, Format.NATIVE) | 6, UnsupportedFormatError),
        (entry(4, Format.NATIVE), OutOfArenaError),  # a slab has places 0 to 3
        (entry(3 * 256, Format.NATIVE), OutOfArenaError),
        (-8, OutOfArenaError),
    ],
)
def test_bad_entries_are_refused_before_anything_is_written(backend: Backend, bad: int, error: type[Exception]) -> None:
    arena = noise_arena(LAYOUT)
    before, bad_entries = arena.clone(), torch.tensor([0, bad], dtype=torch.int32)
    with pytest.raises(error, match=str(bad)):
        backend.copy_blocks(arena, entries(1, 2), bad_entries, LAYOUT)
    with pytest.raises(error, match=str(bad)):
        backend.copy_blocks(arena, bad_entries, entries(1, 2), LAYOUT)
    with pytest.raises(error, match=str(bad)):
        backend.zero_blocks(arena, bad_entries, LAYOUT)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("fmt", Format)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_copying_and_clearing_blocks_of_every_shape_and_format(
    backend: Backend, head_size: int, block_size: int, fmt: Format
) -> None:
    layout = KVLayout(3, head_size, block_size, "float32" if head_size == 80 else "bfloat16", slab_blocks=4)
    arena, size = noise_arena(layout), layout.block_bytes(fmt)
    wanted = arena.clone()
    wanted[:, 2, size : 2 * size] = wanted[:, 0, 2 * size : 3 * size]
    source, target = torch.tensor([[entry(2, fmt)], [entry(512 + 1, fmt)]], dtype=torch.int32)
    backend.copy_blocks(arena, source, target, layout)
    assert torch.equal(arena, wanted)
    wanted[:, 2, size : 2 * size] = 0
    backend.zero_blocks(arena, target, layout)
    assert torch.equal(arena, wanted)


def test_copy_to_another_format_is_refused(backend: Backend) -> None:
    arena = noise_arena(LAYOUT)
    before, int8 = arena.clone(), torch.tensor([entry(256, Format.INT8)], dtype=torch.int32)
    with pytest.raises(UnsupportedFormatError, match=str(int(int8))):
        backend.copy_blocks(arena, entries(0), int8, LAYOUT)
    assert torch.equal(arena, before)


@pytest.mark.parametrize("rows", [[(40, 1)], [(40, 10)], [(1000, 1)]])
@pytest.mark.parametrize(
    ("bad", "error"), [(5, UnsupportedFormatError), (-8, OutOfArenaError), (1 << 30, OutOfArenaError)]
)
def test_attention_refuses_bad_entries(
    backend: Backend, rows: Sequence[tuple[int, int]], bad: int, error: type[Exception]
) -> None:
    case = make_case(rows)
    arena = filled_arena(backend, case)
    wanted = attention(backend, case, arena=arena)
    good = int(case.block_table[0, 1])
    case.block_table[0, 1] = bad
    with pytest.raises(error, match=str(bad)):
        attention(backend, case, arena=arena)
    case.block_table[0, 1] = good
    assert torch.equal(attention(backend, case, arena=arena), wanted)


def test_unsupported_shapes_name_what_is_wrong(cpu: Backend) -> None:
    params, one = AttentionParams(0.1), torch.zeros(1, dtype=torch.int64)

    def warm_up(layout: KVLayout, num_heads: int = 2, params: AttentionParams = params) -> None:
        cpu.warm_up(layout, num_heads, params)

    with pytest.raises(UnsupportedShapeError, match="head size 72"):
        warm_up(KVLayout(1, 72, 16, "float32"))
    with pytest.raises(UnsupportedShapeError, match="block size 4"):
        warm_up(KVLayout(1, 64, 4, "float32"))
    with pytest.raises(UnsupportedShapeError, match="3 query heads"):
        warm_up(LAYOUT, 3)
    with pytest.raises(UnsupportedShapeError, match="sliding_window is 0"):
        warm_up(LAYOUT, 2, AttentionParams(0.1, sliding_window=0))
    key = torch.zeros(1, 2, 64, dtype=torch.float64)
    with pytest.raises(UnsupportedShapeError, match="float64"):
        cpu.write_kv(noise_arena(LAYOUT)[0], key, key, one, LAYOUT)
    narrow = torch.zeros(1, 1, 64)
    with pytest.raises(UnsupportedShapeError, match=r"\[1, 1, 64\]"):
        cpu.write_kv(noise_arena(LAYOUT)[0], narrow, narrow, one, LAYOUT)
    with pytest.raises(UnsupportedShapeError, match="slot_mapping"):
        cpu.write_kv(noise_arena(LAYOUT)[0], narrow.expand(1, 2, 64), narrow.expand(1, 2, 64), one.int(), LAYOUT)
    case = make_case([(40, 1)])
    case.block_table.resize_(0)
    with pytest.raises(UnsupportedShapeError, match="query is"):
        cpu.paged_attention(
            torch.zeros(1, 4, 32),
            noise_arena(LAYOUT)[0],
            make_case([(40, 1)]).batch(),
            params,
            LAYOUT,
            torch.zeros(1, 4, 64),
        )
