"""How much of the KV that decoding rows hold is empty: (allocated - used) / allocated slots, averaged over steps.

The workload is the one of `bench.static_batching`. Beside it what a contiguous allocation of 2,048 or 8,192 tokens for
every row would waste on the same requests.
"""

from collections.abc import Sequence
from statistics import mean

from bench.cell import Cell
from bench.client import Server, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, say
from bench.static_batching import LENGTHS_SEED, ROWS, WORKLOAD
from bench.watch import Watch
from bench.workload import Job
from protos import scheduler_pb2

LIMIT_PERCENT = 3.0


class Waste:
    """The share of empty slots, by step."""

    def __init__(self) -> None:
        self._by_step: dict[int, float] = {}

    def look(self, now_s: float, stats: scheduler_pb2.CellStats) -> None:
        """Take a cell's figures in."""
        del now_s
        allocated = sum(lane.num_allocated_slots for lane in stats.lanes)
        used = sum(lane.num_used_slots for lane in stats.lanes)
        if allocated:
            self._by_step[stats.num_steps_total] = (allocated - used) / allocated

    @property
    def mean_percent(self) -> float:
        """Mean over the steps that were seen, in percent."""
        return 100 * mean(self._by_step.values())

    @property
    def num_steps(self) -> int:
        """Steps that were seen with rows decoding."""
        return len(self._by_step)


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
            waste = Waste()
            with Watch(cell, waste.look):
                await run_closed_loop(server, jobs, ROWS)
            percents.append(waste.mean_percent)
            say(f"repeat {repeat + 1}: {percents[-1]:.2f} % empty over {waste.num_steps} steps")
    for slots in (2048, 8192):
        say(f"contiguous, {slots} tokens a row: {contiguous_waste_percent(jobs, slots):.1f} % empty")
    return [at_most("empty slots of decoding rows", percents, LIMIT_PERCENT, "%")]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
