"""Continuous batching against static batching: output tokens per second over the same requests, 8 at once.

Three sides in turn, with the same weights, dtype and cores: Quire; Quire with a static policy, where a batch runs to
its end before the next begins; and `transformers.generate` on padded batches. Then the first two again on output
lengths that spread 10 : 1, most of them short.
"""

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.cell import Cell
from bench.client import Server, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, LoadFigures, at_least, say, spread
from bench.workload import Job, Lengths, Workload

ROWS = 8
WORKLOAD = Workload(32, Lengths(64, 512), Lengths(16, 256), vocab_size=49000)
SPREAD_WORKLOAD = Workload(32, Lengths(64, 512), Lengths(25, 250, logarithmic=True), vocab_size=49000)
# Of 32 drawn lengths the ideal ratio varies from 1.37 to 2.20 by seed. With this one it is what the distribution gives
# in the mean (1.68, and 2.03 for the spread one), so that the draw favours no side.
LENGTHS_SEED = 22
TRANSFORMERS_LIMIT, STATIC_LIMIT = 2.5, 1.4


def static_steps(jobs: Sequence[Job]) -> int:
    """Return the decode steps of static batching, where a batch takes as many as its longest output has tokens."""
    batches = [jobs[start : start + ROWS] for start in range(0, len(jobs), ROWS)]
    return sum(max(job.num_output_tokens for job in batch) for batch in batches)


def ideal_ratio(jobs: Sequence[Job]) -> float:
    """Return static batching's decode steps over those of full batches: the ratio if a step cost the same always."""
    return static_steps(jobs) * ROWS / sum(job.num_output_tokens for job in jobs)


def reachable_ratio(jobs: Sequence[Job]) -> float:
    """Return the same over the steps that a closed loop takes: at its end rows stay empty, whoever schedules."""
    ends = [0] * ROWS
    for job in jobs:
        heapq.heapreplace(ends, ends[0] + job.num_output_tokens)
    return static_steps(jobs) / max(ends)


async def quire_tokens_per_s(server: Server, jobs: Sequence[Job]) -> float:
    """Return output tokens per second through a cell."""
    return LoadFigures.of(await run_closed_loop(server, jobs, ROWS)).output_tokens_per_s


async def compare_policies(
    continuous: Server, static: Server, workload: Workload, repeats: int
) -> tuple[list[float], list[float]]:
    """Run both cells in turn; every repeat has the same lengths and new contents, so that no prefix is cached."""
    sides: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        jobs = workload.jobs(LENGTHS_SEED, content_seed=repeat)
        for server, rates in zip((continuous, static), sides, strict=True):
            rates.append(await quire_tokens_per_s(server, jobs))
    return sides


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run all sides."""
    from bench.padded import PaddedGenerator  # here: it loads torch and transformers, which the other scripts need not

    flags: dict[str, str | int] = {"model": settings.model, "dtype": settings.dtype, "max_num_seqs": ROWS}
    with (
        ThreadPoolExecutor(1) as computing,
        Cell(**flags) as continuous_cell,
        Cell(**flags, scheduling_policy="static") as static_cell,
    ):
        # One thread loads and generates: a second one that computes changes how OpenMP's threads wait.
        padded = computing.submit(PaddedGenerator, settings.model, settings.dtype).result()
        name = await find_model(continuous_cell.url)
        continuous, static = Server(continuous_cell.url, name), Server(static_cell.url, name)
        ours, statics, theirs = [], [], []
        for repeat in range(repeats):
            jobs = WORKLOAD.jobs(LENGTHS_SEED, content_seed=repeat)
            ours.append(await quire_tokens_per_s(continuous, jobs))
            statics.append(await quire_tokens_per_s(static, jobs))
            theirs.append(computing.submit(padded.tokens_per_s, jobs, ROWS).result())
            say(
                f"repeat {repeat + 1}: {ours[-1]:.1f}, static {statics[-1]:.1f}, transformers {theirs[-1]:.1f} tokens/s"
            )
        spread_ours, spread_statics = await compare_policies(continuous, static, SPREAD_WORKLOAD, repeats)
    say(f"output tokens/s: Quire {spread(ours)}; static policy {spread(statics)}; transformers {spread(theirs)}")
    for name, workload in (("", WORKLOAD), (", lengths spread 10 : 1", SPREAD_WORKLOAD)):
        jobs = workload.jobs(LENGTHS_SEED)
        say(
            f"decode steps of a static policy{name}: {ideal_ratio(jobs):.2f} times those of full batches, "
            f"{reachable_ratio(jobs):.2f} times those of a closed loop; prompts cost both the same"
        )
    return [
        at_least("output tokens/s / transformers.generate in padded batches", ratios(ours, theirs), TRANSFORMERS_LIMIT),
        at_least("output tokens/s / Quire with a static policy", ratios(ours, statics), STATIC_LIMIT),
        at_least("the same, output lengths spread 10 : 1", ratios(spread_ours, spread_statics), STATIC_LIMIT),
    ]


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each repeat."""
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=3)
