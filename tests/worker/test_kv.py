"""How much memory the arena gets, and how it is cut."""

import logging
from pathlib import Path

import pytest
import torch

from kernels.formats import Format, KVLayout
from worker_svc import kv
from worker_svc.arena_plan import plan_arena
from worker_svc.errors import OutOfMemoryAtStartError
from worker_svc.kv import DEFAULT_CPU_BYTES, cpu_budget

NUM_LAYERS = 3
BLOCK_BYTES = 2 * 2 * 64 * 16 * 2 * NUM_LAYERS  # of all layers


def layout_of(slab_blocks: int) -> KVLayout:
    return KVLayout(num_kv_heads=2, head_size=64, block_size=16, native_dtype="bfloat16", slab_blocks=slab_blocks)


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    free = 4 * DEFAULT_CPU_BYTES
    monkeypatch.setattr(kv, "free_host_bytes", lambda: free)
    return free


def test_arena_fills_its_budget_with_whole_slabs() -> None:
    plan = plan_arena(1000 * BLOCK_BYTES + 5, NUM_LAYERS, layout_of)
    assert (plan.num_slabs, plan.layout.slab_blocks, plan.num_blocks) == (62, 16, 992)
    assert plan.num_bytes == 992 * BLOCK_BYTES
    assert plan.num_tokens == 992 * 16
    arena = plan.allocate(torch.device("cpu"))
    assert arena.shape == (NUM_LAYERS, 62, layout_of(16).slab_bytes)
    assert arena.dtype == torch.uint8
    assert not arena.any()
    assert plan.places_per_slab[Format.NATIVE] == 16


@pytest.mark.parametrize(
    ("num_blocks", "slab_blocks", "num_slabs"), [(127, 8, 15), (40, 4, 10), (15, 1, 15), (2, 1, 2)]
)
def test_small_pools_take_smaller_slabs(num_blocks: int, slab_blocks: int, num_slabs: int) -> None:
    plan = plan_arena(num_blocks * BLOCK_BYTES, NUM_LAYERS, layout_of)
    assert (plan.layout.slab_blocks, plan.num_slabs) == (slab_blocks, num_slabs)


@pytest.mark.parametrize("budget", [2 * BLOCK_BYTES - 1, 0, -5])
def test_budget_below_two_blocks_is_refused_with_both_numbers(budget: int) -> None:
    with pytest.raises(OutOfMemoryAtStartError) as caught:
        plan_arena(budget, NUM_LAYERS, layout_of)
    assert caught.value.needed_bytes == 2 * BLOCK_BYTES
    assert caught.value.free_bytes == max(budget, 0)
    assert f"{2 * BLOCK_BYTES:,} bytes" in str(caught.value)


def test_asked_for_bytes_are_met_or_refused(free_bytes: int) -> None:
    assert cpu_budget(free_bytes - 100, 100) == free_bytes - 100
    with pytest.raises(OutOfMemoryAtStartError) as caught:
        cpu_budget(free_bytes - 99, 100)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (free_bytes + 1, free_bytes)
    assert "--kv-cache-memory" in str(caught.value)


def test_default_shrinks_to_half_of_what_is_free(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert cpu_budget(None, 100) == DEFAULT_CPU_BYTES
    assert not caplog.records
    monkeypatch.setattr(kv, "free_host_bytes", lambda: DEFAULT_CPU_BYTES)
    with caplog.at_level(logging.WARNING):
        assert cpu_budget(None, 100) == (DEFAULT_CPU_BYTES - 100) // 2
    assert f"only {DEFAULT_CPU_BYTES} are free" in caplog.text


def test_free_memory_of_this_machine_is_a_number_of_bytes() -> None:
    assert 1024**2 < kv.free_host_bytes() < 1024**5


@pytest.mark.parametrize("names", kv._CGROUP_FILES, ids=["version 2", "version 1"])
@pytest.mark.parametrize(("limit", "free"), [("1000000", 1_000_000 - 400_000 + 30_000 + 7_000), (str(2**62), None)])
def test_container_s_limit_counts_without_its_pages_of_files(
    names: tuple[str, str, str], limit: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = (limit, "400000", "cache 5\ninactive_file 30000\nactive_file 7000")
    for name, text in zip(names, contents, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(kv, "_CGROUP", tmp_path)
    assert kv.free_host_bytes() == free if free is not None else 1024**2 < kv.free_host_bytes() < 2**60


def test_weights_that_do_not_fit_are_refused(free_bytes: int) -> None:
    kv.check_weights_fit(free_bytes, torch.device("cpu"))
    with pytest.raises(OutOfMemoryAtStartError, match="weights"):
        kv.check_weights_fit(free_bytes + 1, torch.device("cpu"))
