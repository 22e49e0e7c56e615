"""What a GPU leaves for the arena, reckoned from what the largest steps and a few graphs took."""

import pytest

from tests.worker.fake_gpu import GIB, FakeGpu
from worker_svc.errors import OutOfMemoryAtStartError
from worker_svc.gpu_memory import MemoryNeeds, measure_needs

NEEDS = MemoryNeeds(total_bytes=100 * GIB, foreign_bytes=2 * GIB, peak_bytes=20 * GIB, graph_bytes=3 * GIB)


def test_needs_are_weights_the_largest_steps_and_what_others_hold() -> None:
    gpu = FakeGpu(foreign_bytes=GIB)  # another process
    gpu.allocate(16 * GIB)  # weights
    gpu.allocate(2 * GIB)  # an arena for the measurement

    def run_largest_steps() -> None:
        gpu.foreign_bytes += GIB // 2  # kernels are loaded
        for activation_bytes in (3 * GIB, GIB):
            gpu.allocate(activation_bytes)
            gpu.free(activation_bytes)

    needs = measure_needs(gpu, run_largest_steps, 2 * GIB, [], 0)
    assert needs == MemoryNeeds(100 * GIB, foreign_bytes=3 * GIB // 2, peak_bytes=19 * GIB, graph_bytes=0)


def test_what_was_used_before_the_measurement_does_not_count() -> None:
    gpu = FakeGpu()
    gpu.allocate(50 * GIB)
    gpu.free(50 * GIB)  # loading took more than any step does
    gpu.allocate(10 * GIB)
    needs = measure_needs(gpu, lambda: None, 0, [], 0)
    assert (needs.peak_bytes, needs.foreign_bytes) == (10 * GIB, 0)


def test_graphs_share_the_largest_ones_pool() -> None:
    gpu = FakeGpu()

    def record_largest() -> None:
        gpu.allocate(2 * GIB)  # the pool
        gpu.foreign_bytes += 3  # the driver's copy of the graph
        gpu.allocate(GIB)
        gpu.free(GIB)  # what its first run left in the allocator

    def record_next() -> None:
        gpu.foreign_bytes += 2

    needs = measure_needs(gpu, lambda: None, 0, [record_largest, record_next], 10)
    assert needs.graph_bytes == 2 * GIB + 3 + 9 * 2


def test_memory_that_others_give_back_meanwhile_is_not_negative() -> None:
    gpu = FakeGpu(foreign_bytes=GIB)

    def record() -> None:
        gpu.foreign_bytes = 0

    assert measure_needs(gpu, lambda: None, 0, [record], 1).graph_bytes == 0


def test_arena_gets_what_is_left_of_the_share() -> None:
    assert NEEDS.arena_bytes(0.9, None) == 65 * GIB
    assert NEEDS.arena_bytes(0.5, None) == 25 * GIB


def test_share_that_leaves_nothing_is_refused_with_both_numbers() -> None:
    with pytest.raises(OutOfMemoryAtStartError, match="--gpu-memory-utilization") as caught:
        NEEDS.arena_bytes(0.25, None)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (23 * GIB, 23 * GIB)
    with pytest.raises(OutOfMemoryAtStartError) as caught:
        NEEDS.arena_bytes(0.01, None)
    assert caught.value.free_bytes == 0


def test_bytes_asked_for_are_met_or_refused() -> None:
    assert NEEDS.arena_bytes(0.1, 75 * GIB) == 75 * GIB
    with pytest.raises(OutOfMemoryAtStartError, match="--kv-cache-memory") as caught:
        NEEDS.arena_bytes(0.9, 75 * GIB + 1)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (98 * GIB + 1, 98 * GIB)
