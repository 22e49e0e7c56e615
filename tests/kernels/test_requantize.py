"""Blocks made narrower, bit by bit against the formula."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.dispatch import Backend
from kernels.errors import OutOfArenaError, UnsupportedFormatError
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, entry
from kernels.quantize import round_down, round_up
from tests.kernels.formula import Array, Side, dequantized, quantized, read_side

BACKENDS = ["reference", "cpu"]
NARROW = (Format.INT8, Format.FP8, Format.K8V4, Format.INT4)
CHAINS = [
    (Format.INT8, Format.INT4),
    (Format.FP8, Format.INT4),
    (Format.INT8, Format.FP8, Format.K8V4),
    (Format.INT8, Format.K8V4, Format.INT4),
]
COPIED = {("key", Format.INT8, Format.K8V4), ("value", Format.K8V4, Format.INT4)}
LAYOUTS = [
    KVLayout(2, 64, 16, "bfloat16", slab_blocks=3),
    KVLayout(1, 80, 8, "float32", slab_blocks=3),
    KVLayout(3, 128, 32, "float16", slab_blocks=3),
    KVLayout(1, 96, 64, "bfloat16", slab_blocks=3),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.getfixturevalue(request.param)
    return chosen


def odd_rows(layout: KVLayout, seed: int = 0) -> Tensor:
    """Return float32 [block_size, num_kv_heads, head_size] in which rows, and columns, are hard to quantize."""
    random = torch.Generator().manual_seed(seed)
    shape = layout.block_size, layout.num_kv_heads, layout.head_size
    x = torch.randn(shape, generator=random)
    noise = torch.randn(layout.num_kv_heads, layout.head_size, generator=random)
    rows = [
        torch.tensor(0.0), torch.tensor(-0.0), torch.tensor(3.7), torch.tensor(-1e-9), 1000 + 1e-3 * noise,
        1e-7 * noise, 1e-30 * noise, 1e5 * noise, 3e38 * noise, -noise.abs() - 500,
    ]  # fmt: skip
    for token, row in enumerate(rows[: layout.block_size - 3]):
        x[token] = row
    for token, number in ((-1, float("nan")), (-2, float("inf")), (-3, -float("inf"))):
        x[token, :, 5 + token] = number
    x[:, :, 7], x[:, :, 8] = 2.5, 1e4 + x[:, :, 8] / 100
    x[: layout.block_size // 2, 0, -1] = -0.0
    return x


def only(block_id: int, fmt: Format) -> Tensor:
    return torch.tensor([entry(block_id, fmt)], dtype=torch.int32)


def block_bytes(layer: Tensor, slab_idx: int, layout: KVLayout, fmt: Format) -> Tensor:
    """Return the first block of a slab."""
    return layer[slab_idx, : layout.block_bytes(fmt)]


def arena_of(backend: Backend, key: Tensor, value: Tensor, layout: KVLayout, num_slabs: int = 5) -> Tensor:
    """Return an arena of one layer whose first native block holds the keys and values."""
    arena = torch.full((1, num_slabs, layout.slab_bytes), 0xA5, dtype=torch.uint8)
    backend.write_kv(arena[0], key, value, torch.arange(layout.block_size), layout)
    return arena


def as_written(x: Tensor, layout: KVLayout) -> Array:
    """Return what native blocks keep of float32 [block_size, num_kv_heads, head_size], heads first."""
    kept: Array = x.to(getattr(torch, layout.native_dtype)).float().transpose(0, 1).contiguous().numpy()
    return kept


def narrow(backend: Backend, x: Tensor, layout: KVLayout, *formats: Format) -> tuple[Side, Side]:
    """Return keys and values of x (values in reversed order) brought from native through the formats in turn."""
    arena = arena_of(backend, x, x.flip(0), layout)
    source = only(0, Format.NATIVE)
    for slab_idx, fmt in enumerate(formats, start=1):
        target = only(slab_idx * PLACES_PER_SLAB, fmt)
        backend.requantize_blocks(arena, source, target, layout)
        source = target
    block = block_bytes(arena[0], len(formats), layout, formats[-1])
    key, value = (read_side(backend, block, side, layout, formats[-1]) for side in ("key", "value"))
    return key, value


def wanted(x: Array, side: str, formats: Sequence[Format]) -> Side:
    """Return what the formula makes of native numbers on their way through formats; a codec that stays, stays."""
    result, before = quantized(x, side, formats[0]), formats[0]
    for fmt in formats[1:]:
        copied = (
            (before, fmt) == (Format.INT8, Format.K8V4)
            if side == "key"
            else (before, fmt) == (Format.K8V4, Format.INT4)
        )
        if not copied:
            result = quantized(dequantized(result, side, before), side, fmt)
        before = fmt
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("formats", [*((fmt,) for fmt in NARROW), *CHAINS], ids=str)
def test_every_bit_is_as_the_formula_says(backend: Backend, layout: KVLayout, formats: Sequence[Format]) -> None:
    for x in (odd_rows(layout), torch.randn(odd_rows(layout).shape, generator=torch.Generator().manual_seed(3))):
        key, value = narrow(backend, x, layout, *formats)
        key.assert_same_bits(wanted(as_written(x, layout), "key", formats))
        value.assert_same_bits(wanted(as_written(x.flip(0), layout), "value", formats))


@pytest.mark.parametrize("fmt", NARROW)
def test_what_a_block_says_is_finite(fmt: Format) -> None:
    x = odd_rows(LAYOUTS[1])
    for side in ("key", "value"):
        heads_first = x.transpose(0, 1).contiguous().numpy()
        assert np.isfinite(dequantized(quantized(heads_first, side, fmt), side, fmt)).all()


@pytest.mark.parametrize("fmt", [Format.INT8, Format.K8V4, Format.INT4])
@pytest.mark.parametrize("offset", [0.0, 7.3, -1234.5, 60000.0])
def test_numbers_lie_within_half_a_scale(fmt: Format, offset: float) -> None:
    x = (torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)) + offset).numpy()
    for side in ("key", "value"):
        codes = quantized(x, side, fmt)
        scale = np.expand_dims(codes.scale, 1 if (side, fmt) == ("key", Format.INT4) else 2).astype(np.float32)
        assert (np.abs(dequantized(codes, side, fmt) - x) <= scale / 2 + np.abs(x) * 2.0**-23).all()


def test_constant_group_stays_as_it_is(backend: Backend) -> None:
    layout = LAYOUTS[0]
    for fmt in NARROW[:1] + NARROW[2:]:
        key, value = narrow(backend, torch.full((16, 2, 64), -37.25), layout, fmt)
        for side, codes in (("key", key), ("value", value)):
            assert (dequantized(codes, side, fmt) == np.float32(-37.25)).all()


@pytest.mark.parametrize("fmt", NARROW)
def test_a_number_that_is_not_finite_costs_its_own_group_alone(backend: Backend, fmt: Format) -> None:
    layout = LAYOUTS[1]
    x = torch.randn(8, 1, 80, generator=torch.Generator().manual_seed(2))
    spoilt = x.clone()
    spoilt[3, 0, 11] = float("inf")
    good, bad = narrow(backend, x, layout, fmt), narrow(backend, spoilt, layout, fmt)
    for side, before, after, token in zip(("key", "value"), good, bad, (3, 4), strict=True):
        changed = (dequantized(before, side, fmt) != dequantized(after, side, fmt)).any(0)
        changed[token] = False  # its token's group,
        if (side, fmt) == ("key", Format.INT4):
            changed[:, 11] = False  # or its channel's
        assert not changed.any()


def test_many_blocks_of_all_layers_and_nothing_else(backend: Backend) -> None:
    layout = LAYOUTS[0]
    arena = torch.randint(0, 256, (3, 4, layout.slab_bytes), dtype=torch.uint8)
    for layer in arena:
        x = torch.randn(48, 2, 64)
        backend.write_kv(layer, x, x + 1, torch.arange(48), layout)
    singly = arena.clone()
    sources = torch.tensor([entry(place, Format.NATIVE) for place in (0, 2, 1)], dtype=torch.int32)
    targets = torch.tensor(
        [entry(256 + 3, Format.INT8), entry(512, Format.INT4), entry(256 + 1, Format.INT8)], dtype=torch.int32
    )
    before = arena.clone()
    backend.requantize_blocks(arena, sources, targets, layout)
    for i in range(3):
        for layer in range(3):
            backend.requantize_blocks(singly[layer : layer + 1], sources[i : i + 1], targets[i : i + 1], layout)
    assert torch.equal(arena, singly)
    size = layout.block_bytes(Format.INT8)
    assert torch.equal(arena[:, [0, 3]], before[:, [0, 3]])
    assert torch.equal(arena[:, 1, 2 * size : 3 * size], before[:, 1, 2 * size : 3 * size])
    assert torch.equal(arena[:, 1, :size], before[:, 1, :size])
    assert torch.equal(arena[:, 2, layout.block_bytes(Format.INT4) :], before[:, 2, layout.block_bytes(Format.INT4) :])


def test_no_block(backend: Backend) -> None:
    layout = LAYOUTS[0]
    arena, nothing = torch.zeros(1, 1, layout.slab_bytes, dtype=torch.uint8), torch.empty(0, dtype=torch.int32)
    backend.requantize_blocks(arena, nothing, nothing, layout)
    assert not arena.any()


@pytest.mark.parametrize(
    ("source", "target", "error"),
    [
        (entry(0, Format.NATIVE), entry(256, Format.NATIVE), UnsupportedFormatError),
        (entry(0, Format.K8V4), entry(256, Format.INT8), UnsupportedFormatError),
        (entry(0, Format.INT8), entry(256, Format.INT8), UnsupportedFormatError),
        (entry(0, Format.NATIVE), 256 * 8 + 7, UnsupportedFormatError),
        (6, entry(256, Format.INT4), UnsupportedFormatError),
        (entry(0, Format.NATIVE), entry(256 + 5, Format.INT8), OutOfArenaError),  # a slab has places 0 to 4
        (entry(3, Format.NATIVE), entry(256, Format.INT8), OutOfArenaError),
        (entry(0, Format.NATIVE), entry(4 * 256, Format.INT8), OutOfArenaError),
        (-8, entry(256, Format.INT8), OutOfArenaError),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    backend: Backend, source: int, target: int, error: type[Exception]
) -> None:
    layout = LAYOUTS[0]
    arena = torch.randint(0, 256, (2, 4, layout.slab_bytes), dtype=torch.uint8)
    before = arena.clone()
    good = entry(1, Format.NATIVE), entry(512, Format.INT4)
    with pytest.raises(error):
        backend.requantize_blocks(
            arena, torch.tensor([good[0], source]).int(), torch.tensor([good[1], target]).int(), layout
        )
    assert torch.equal(arena, before)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=20))
def test_float16_rounded_to_one_side(numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    lower, upper = round_down(x), round_up(x)
    assert (lower.float() <= x).all()
    assert (upper.float() >= x).all()
    one_up = torch.from_numpy(np.nextafter(lower.numpy(), np.float16(65504)))
    assert ((lower == upper) | (one_up == upper)).all()
