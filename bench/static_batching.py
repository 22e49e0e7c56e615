"""Continuous batching against static batching: output tokens per second over requests of like lengths, 8 at once.

In turn, with the same weights, dtype and cores: Quire; Quire with a static policy, where a batch runs to its end before
the next begins; and `transformers.generate` on padded batches. Then, but for transformers, on output lengths that
spread 10 : 1, most of them short.

In static batching rows neither join nor leave: each is computed until the batch's longest output is done, as
transformers does it, and what comes after a row's own end is thrown away (here once it has been streamed, in
transformers before). Beside it stands a stronger rival, Quire's static policy by itself: ended rows leave, half
of continuous batching. The claim is the same against both. Against the second it can hold only where a step costs much
beside what its tokens cost: at these lengths as much as 70 tokens, of prompts or outputs. Reading the weights alone
costs as much as some 200 tokens on an H200, and as 10 to 20 on two CPU cores without matrix units.
"""

import heapq
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count

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


def batches(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """Return the batches that a static policy makes of jobs that come in order."""
    return [jobs[start : start + ROWS] for start in range(0, len(jobs), ROWS)]


def static_steps(jobs: Sequence[Job]) -> int:
    """Return the decode steps of static batching, where a batch takes as many as its longest output has tokens."""
    return sum(max(job.num_output_tokens for job in batch) for batch in batches(jobs))


def ideal_ratio(jobs: Sequence[Job]) -> float:
    """Return static batching's decode steps over those of full batches: the ratio if a step cost the same always."""
    return static_steps(jobs) * ROWS / sum(job.num_output_tokens for job in jobs)


def reachable_ratio(jobs: Sequence[Job]) -> float:
    """Return the same over the steps that a closed loop takes: at its end rows stay empty, whoever schedules."""
    ends = [0] * ROWS
    for job in jobs:
        heapq.heapreplace(ends, ends[0] + job.num_output_tokens)
    return static_steps(jobs) / max(ends)


def as_long_as_the_batch(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with every output as long as the longest of its batch."""
    return [
        replace(job, num_output_tokens=max(other.num_output_tokens for other in batch))
        for batch in batches(jobs)
        for job in batch
    ]


@dataclass(slots=True)
class Rates:
    """Output tokens per second of each side, one entry a repeat."""

    workload: Workload
    continuous: list[float] = field(default_factory=list)
    static: list[float] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)  # static batches that ended rows leave

    async def add(self, continuous: Server, static: Server, content_seeds: Iterator[int]) -> None:
        """Run each side once, every time with new contents, so that no prefix is cached."""
        jobs, new_jobs = (self.workload.jobs(LENGTHS_SEED, next(content_seeds)) for _ in range(2))
        self.continuous.append(await wanted_tokens_per_s(continuous, jobs, jobs))
        self.static.append(await wanted_tokens_per_s(static, jobs, as_long_as_the_batch(jobs)))
        self.leaving.append(await wanted_tokens_per_s(static, new_jobs, new_jobs))
        say(
            f"repeat {len(self.static)}: {self.continuous[-1]:.1f}, static batches {self.static[-1]:.1f}, which ended "
            f"rows leave {self.leaving[-1]:.1f} tokens/s"
        )


async def wanted_tokens_per_s(server: Server, jobs: Sequence[Job], sent: Sequence[Job]) -> float:
    """Send `sent` through a cell; return the output tokens that `jobs` want over the seconds that it took."""
    figures = LoadFigures.of(await run_closed_loop(server, sent, ROWS))
    assert figures.num_output_tokens == sum(job.num_output_tokens for job in sent)
    assert figures.num_cached_tokens == 0
    return sum(job.num_output_tokens for job in jobs) / figures.duration_s


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run all sides."""
    from bench.padded import PaddedGenerator  # here: it loads torch and transformers, which the other scripts need not

    flags: dict[str, str | int] = {"model": settings.model, "dtype": settings.dtype, "max_num_seqs": ROWS}
    rates, spread_rates, content_seeds = Rates(WORKLOAD), Rates(SPREAD_WORKLOAD), count()
    with (
        ThreadPoolExecutor(1) as computing,
        Cell(**flags) as continuous_cell,
        Cell(**flags, scheduling_policy="static") as static_cell,
    ):
        # One thread loads and generates: a second one that computes changes how OpenMP's threads wait.
        padded = computing.submit(PaddedGenerator, settings.model, settings.dtype).result()
        name = await find_model(continuous_cell.url)
        cells = Server(continuous_cell.url, name), Server(static_cell.url, name)
        theirs = []
        for _ in range(repeats):
            await rates.add(*cells, content_seeds)
            theirs.append(computing.submit(padded.tokens_per_s, WORKLOAD.jobs(LENGTHS_SEED), ROWS).result())
            say(f"transformers {theirs[-1]:.1f} tokens/s")
        for _ in range(repeats):
            await spread_rates.add(*cells, content_seeds)
    findings = [
        at_least(
            "output tokens/s / transformers.generate in padded batches",
            ratios(rates.continuous, theirs),
            TRANSFORMERS_LIMIT,
        )
    ]
    for found in (rates, spread_rates):
        outputs = [job.num_output_tokens for job in found.workload.jobs(LENGTHS_SEED)]
        name = f"outputs of {min(outputs)} to {max(outputs)} tokens, {sum(outputs) / len(outputs):.0f} in the mean"
        report(name, found)
        of_static, of_leaving = ratios(found.continuous, found.static), ratios(found.continuous, found.leaving)
        findings.append(at_least(f"output tokens/s / Quire with static batches, {name}", of_static, STATIC_LIMIT))
        findings.append(at_least("the same / static batches that ended rows leave", of_leaving, STATIC_LIMIT))
    return findings


def report(name: str, rates: Rates) -> None:
    """Print the rates of a workload, beside what the lengths of its outputs would give."""
    jobs = rates.workload.jobs(LENGTHS_SEED)
    say(
        f"{name}: Quire {spread(rates.continuous)} output tokens/s, static batches {spread(rates.static)}, which ended "
        f"rows leave {spread(rates.leaving)}"
    )
    say(
        f"  static batches take {ideal_ratio(jobs):.2f} times the decode steps of full ones, "
        f"{reachable_ratio(jobs):.2f} times those of a closed loop; prompts cost all the same"
    )


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each repeat."""
    return [a / b for a, b in zip(above, below, strict=True)]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=3)
