"""Scheduler and kernels may not import each other, and must read block-table entries alike; gateways name formats."""

import pytest

from kernels import formats
from protos import common_pb2
from scheduler_svc.core import arena, types
from worker_svc.settings import KV_FORMATS


def test_format_codes_are_the_same() -> None:
    codes = {fmt.name: fmt.value for fmt in formats.Format}
    assert {fmt.name: fmt.value for fmt in types.Format} == codes
    assert [name.upper() for name in KV_FORMATS] == list(codes)
    assert {name.removeprefix("KV_FORMAT_"): code for name, code in common_pb2.KvFormat.items()} == codes


def test_slabs_are_the_same_stride_apart() -> None:
    assert arena.PLACES_PER_SLAB == formats.PLACES_PER_SLAB


@pytest.mark.parametrize("fmt", types.Format)
@pytest.mark.parametrize("block_id", [0, 255, 256 * 7 + 30, 2**28 - 1])
def test_entries_are_the_same(block_id: int, fmt: types.Format) -> None:
    entry = arena.entry_of(types.BlockId(block_id), fmt)
    assert entry == formats.entry(block_id, formats.Format(fmt.value))
    assert (formats.block_of(entry), formats.format_of(entry).name) == (block_id, fmt.name)
    assert (arena.block_id_of(entry), arena.format_of(entry)) == (block_id, fmt)
