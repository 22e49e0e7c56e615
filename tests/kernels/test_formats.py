import subprocess
import sys

import pytest
import torch

from kernels.dispatch import backend_for
from kernels.errors import UnsupportedDeviceError, UnsupportedFormatError
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, block_of, entry, format_of


def test_entry_carries_block_and_format() -> None:
    block_id = 7 * PLACES_PER_SLAB + 30
    assert entry(block_id, Format.NATIVE) == block_id * 8
    assert block_of(entry(block_id, Format.NATIVE)) == block_id
    assert format_of(entry(block_id, Format.NATIVE)) is Format.NATIVE


def test_unknown_format_code_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="code 6"):
        format_of(8 * 5 + 6)


@pytest.mark.parametrize(("native_dtype", "block_bytes"), [("bfloat16", 8192), ("float16", 8192), ("float32", 16384)])
def test_native_block_holds_keys_and_values(native_dtype: str, block_bytes: int) -> None:
    layout = KVLayout(num_kv_heads=1, head_size=128, block_size=16, native_dtype=native_dtype)
    assert layout.block_bytes(Format.NATIVE) == block_bytes
    assert layout.slab_bytes == 16 * block_bytes
    assert layout.blocks_per_slab(Format.NATIVE) == 16


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
