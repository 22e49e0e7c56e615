"""How much of a GPU's memory the KV arena may take: measured by running the largest steps, then reckoned.

total  = foreign                what the driver, loaded kernels and other processes hold
       + peak                   weights, and tensors of the largest step
       + graphs                 recorded decode steps: a pool of tensors, and the driver's own copy of each
       + arena                  what is left of the share --gpu-memory-utilization
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker_svc.errors import OutOfMemoryAtStartError

_ADVICE = "lower --max-num-batched-tokens or --max-num-seqs, or raise --gpu-memory-utilization"


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A GPU's memory at one moment, in bytes."""

    total_bytes: int
    free_bytes: int  # as the driver says, over all processes
    reserved_bytes: int  # held by this process's tensors, or kept for its next ones
    peak_bytes: int  # the most that tensors held since the peak was reset


class MemoryProbe(Protocol):
    """What tells of a GPU's memory."""

    def read(self) -> MemoryReading:
        """Wait for the device, and return its memory now."""

    def reset_peak(self) -> None:
        """Let the peak start from what tensors hold now."""

    def release_cached(self) -> None:
        """Give back what is kept for tensors to come."""


class CudaMemoryProbe:
    """MemoryProbe of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        """See MemoryProbe."""
        torch.cuda.synchronize(self._device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        return MemoryReading(total_bytes, free_bytes, reserved_bytes, torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        """See MemoryProbe."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_cached(self) -> None:
        """See MemoryProbe."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a worker takes of a GPU besides its arena, in bytes."""

    total_bytes: int  # of the GPU
    foreign_bytes: int
    peak_bytes: int
    graph_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return self.foreign_bytes + self.peak_bytes + self.graph_bytes

    def arena_bytes(self, utilization: float, asked_bytes: int | None) -> int:
        """Return the bytes for the arena: those asked for, or what `utilization` (0 to 1) of the GPU leaves.

        Raises OutOfMemoryAtStartError when there are none, or fewer than were asked for.
        """
        if asked_bytes is not None:
            if asked_bytes + self.needed_bytes > self.total_bytes:
                raise OutOfMemoryAtStartError(
                    f"a KV arena of {asked_bytes:,} bytes with weights, activations and graphs",
                    asked_bytes + self.peak_bytes + self.graph_bytes,
                    self.total_bytes - self.foreign_bytes,
                    "lower --kv-cache-memory",
                )
            return asked_bytes
        share_bytes = int(self.total_bytes * utilization)
        if self.needed_bytes >= share_bytes:
            raise OutOfMemoryAtStartError(
                "a worker without any KV",
                self.peak_bytes + self.graph_bytes,
                max(0, share_bytes - self.foreign_bytes),
                _ADVICE,
            )
        return share_bytes - self.needed_bytes


def measure_needs(
    probe: MemoryProbe,
    run_largest_steps: Callable[[], None],
    uncounted_bytes: int,
    record_graphs: Sequence[Callable[[], None]],
    num_graphs: int,
) -> MemoryNeeds:
    """Run the largest steps and record a few graphs; return what the worker needs.

    Args:
        probe: of the GPU, which holds the weights already.
        run_largest_steps: runs what takes the most memory.
        uncounted_bytes: of tensors that exist for the measurement alone.
        record_graphs: each records one graph and keeps it, the largest first; empty when there will be none.
        num_graphs: that will be recorded in the end. All share the largest one's pool, so each of the others takes what
            the last of these took.
    """
    probe.release_cached()
    probe.reset_peak()
    run_largest_steps()
    reading = probe.read()
    # After the steps, which load kernels and libraries.
    foreign_bytes = reading.total_bytes - reading.free_bytes - reading.reserved_bytes
    probe.release_cached()
    costs = [_free_bytes_taken(probe, record) for record in record_graphs]
    graph_bytes = sum(costs) + (num_graphs - len(costs)) * costs[-1] if costs else 0
    return MemoryNeeds(reading.total_bytes, foreign_bytes, reading.peak_bytes - uncounted_bytes, graph_bytes)


def _free_bytes_taken(probe: MemoryProbe, action: Callable[[], None]) -> int:
    before = probe.read().free_bytes
    action()
    probe.release_cached()
    return max(0, before - probe.read().free_bytes)
