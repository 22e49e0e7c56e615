import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.dispatch import backend_for
from kernels.errors import UnsupportedDeviceError, UnsupportedFormatError
from kernels.formats import PLACES_PER_SLAB, Encoding, Format, KVLayout, block_of, entry, format_of


def test_entry_carries_block_and_format() -> None:
    block_id = 7 * PLACES_PER_SLAB + 30
    assert entry(block_id, Format.NATIVE) == block_id * 8
    assert block_of(entry(block_id, Format.NATIVE)) == block_id
    assert format_of(entry(block_id, Format.NATIVE)) is Format.NATIVE


@pytest.mark.parametrize("fmt", Format)
def test_every_format_has_room_in_an_entry(fmt: Format) -> None:
    assert format_of(entry(300, fmt)) is fmt
    assert block_of(entry(300, fmt)) == 300


def test_format_codes_stay() -> None:  # the scheduler and its workers may be of different versions
    assert {fmt.name: int(fmt) for fmt in Format} == {"NATIVE": 0, "INT8": 1, "FP8": 2, "K8V4": 3, "INT4": 4}


def test_unknown_format_code_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="code 6"):
        format_of(8 * 5 + 6)


@pytest.mark.parametrize(("native_dtype", "block_bytes"), [("bfloat16", 8192), ("float16", 8192), ("float32", 16384)])
def test_native_block_holds_keys_and_values(native_dtype: str, block_bytes: int) -> None:
    layout = KVLayout(num_kv_heads=1, head_size=128, block_size=16, native_dtype=native_dtype)
    assert layout.block_bytes(Format.NATIVE) == block_bytes
    assert layout.slab_bytes == 16 * block_bytes
    assert layout.blocks_per_slab(Format.NATIVE) == 16


@pytest.mark.parametrize(
    ("fmt", "block_bytes", "blocks"),
    [
        (Format.INT8, 2 * 2048 + 4 * 32, 31),
        (Format.FP8, 2 * 2048 + 2 * 32, 31),
        (Format.K8V4, 2048 + 1024 + 4 * 32, 40),
        (Format.INT4, 2 * 1024 + 2 * 256 + 2 * 32, 49),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_capacity_against_native(num_kv_heads: int, fmt: Format, block_bytes: int, blocks: int) -> None:
    layout = KVLayout(num_kv_heads, head_size=128, block_size=16, native_dtype="bfloat16")
    assert layout.block_bytes(fmt) == num_kv_heads * block_bytes
    assert layout.blocks_per_slab(fmt) == blocks  # where native has 16


def test_a_slab_holds_no_more_blocks_than_an_entry_can_name() -> None:
    layout = KVLayout(1, 64, 16, "float32", slab_blocks=100)
    assert layout.blocks_per_slab(Format.INT8) == PLACES_PER_SLAB


def test_planes_of_int4_keys_by_channel() -> None:
    planes = KVLayout(3, 64, 16, "bfloat16").planes(Format.INT4)
    assert list(planes) == ["key", "value", "key_scale", "key_minimum", "value_scale", "value_minimum"]
    assert {name: plane.width for name, plane in planes.items()} == {
        "key": 16 * 64, "value": 16 * 64, "key_scale": 64, "key_minimum": 64, "value_scale": 16, "value_minimum": 16
    }  # fmt: skip
    assert planes["value"].offset == 3 * 16 * 64 // 2
    assert planes["key_scale"].encoding is Encoding.FLOAT16
    assert planes["value_minimum"].num_bytes == 3 * 16 * 2


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(1, 70)),
    native_dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    fmt=st.sampled_from(Format),
)
def test_planes_are_aligned_and_lie_one_after_the_other(
    shape: tuple[int, int, int], native_dtype: str, fmt: Format
) -> None:
    layout = KVLayout(*shape, native_dtype)
    end = 0
    for plane in layout.planes(fmt).values():
        assert plane.offset % 16 == 0
        assert 0 <= plane.offset - end < 16
        end = plane.offset + plane.num_bytes
    assert layout.block_bytes(fmt) % 16 == 0
    assert 0 <= layout.block_bytes(fmt) - end < 16


def test_places_are_counted_in_slabs() -> None:
    layout = KVLayout(num_kv_heads=2, head_size=64, block_size=16, native_dtype="bfloat16", slab_blocks=4)
    assert layout.byte_offset(entry(3 * PLACES_PER_SLAB + 2, Format.NATIVE)) == 3 * layout.slab_bytes + 2 * 8192


@pytest.mark.parametrize(
    "fields", [{"native_dtype": "int8"}, {"num_kv_heads": 0}, {"block_size": -1}, {"slab_blocks": 257}]
)
def test_impossible_layout_is_refused(fields: dict[str, int | str]) -> None:
    name = next(iter(fields))
    good: dict[str, int | str] = {"num_kv_heads": 1, "head_size": 64, "block_size": 16, "native_dtype": "float32"}
    with pytest.raises(ValueError, match=name):
        KVLayout(**{**good, **fields})  # type: ignore[arg-type]


def test_backend_of_a_device() -> None:
    assert backend_for(torch.device("cpu")) is backend_for(torch.device("cpu"))
    with pytest.raises(UnsupportedDeviceError, match="meta"):
        backend_for(torch.device("meta"))


def test_formats_come_without_torch() -> None:
    code = "import sys, kernels.formats; assert not {'torch', 'numba', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
