"""How much of the KV that decoding rows hold is empty: (allocated - used) / allocated slots, averaged over steps.

The workload is the one of `bench.static_batching`. Beside it what a contiguous allocation of 2,048 or 8,192 tokens for
every row would waste on the same requests.
"""

import threading
from collections.abc import Sequence
from statistics import mean
from typing import Self

from bench.cell import Cell
from bench.client import Server, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, say
from bench.static_batching import LENGTHS_SEED, ROWS, WORKLOAD
from bench.workload import Job
from protos import scheduler_pb2

LIMIT_PERCENT = 3.0
WATCH_INTERVAL_MS = 20


class WasteWatch:
    """Reads a cell's Watch stream in a thread of its own, as a context manager."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._wastes_by_step: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and wait for the thread."""
        self._is_over.set()
        self._thread.join()

    @property
    def mean_percent(self) -> float:
        """Mean over the steps that were seen, in percent."""
        return 100 * mean(self._wastes_by_step.values())

    @property
    def num_steps(self) -> int:
        """Steps that were seen with rows decoding."""
        return len(self._wastes_by_step)

    def _read(self) -> None:
        request = scheduler_pb2.WatchRequest(interval_ms=WATCH_INTERVAL_MS)
        with self._cell.scheduler() as stub:
            for stats in stub.Watch(request, metadata=self._cell.metadata):
                allocated = sum(lane.num_allocated_slots for lane in stats.lanes)
                used = sum(lane.num_used_slots for lane in stats.lanes)
                if allocated:
                    self._wastes_by_step[stats.num_steps_total] = (allocated - used) / allocated
                if self._is_over.is_set():
                    return


def contiguous_waste_percent(jobs: Sequence[Job], slots: int) -> float:
    """Return what rows of `slots` slots each would leave empty, averaged over the jobs' decode steps, in percent."""
    steps = sum(job.num_output_tokens for job in jobs)
    used = sum(min(job.num_prompt_tokens + done, slots) for job in jobs for done in range(1, job.num_output_tokens + 1))
    return 100 * (1 - used / (steps * slots))


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run the workload and watch."""
    percents = []
    with Cell(model=settings.model, dtype=settings.dtype, max_num_seqs=ROWS) as cell:
        server = Server(cell.url, await find_model(cell.url))
        for repeat in range(repeats):
            jobs = WORKLOAD.jobs(LENGTHS_SEED, content_seed=repeat)
            with WasteWatch(cell) as watch:
                await run_closed_loop(server, jobs, ROWS)
            percents.append(watch.mean_percent)
            say(f"repeat {repeat + 1}: {percents[-1]:.2f} % empty over {watch.num_steps} steps")
    for slots in (2048, 8192):
        say(f"contiguous, {slots} tokens a row: {contiguous_waste_percent(jobs, slots):.1f} % empty")
    return [at_most("empty slots of decoding rows", percents, LIMIT_PERCENT, "%")]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
