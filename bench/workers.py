"""Several workers in one cell: whether each has its share of the rows, and whether a prefix gets to where it is used.

Clients send streams of mixed lengths, half of them with a common prefix: first six at once for each worker, then, in
the light load, one. How rows are spread is told by the cell's Watch stream (bench/lanes.py), of the steady part of the
load: from the first to the last sample in which all clients have a request in the cell. What a request finds cached
lies on the worker that it runs on, so each worker computes the prefix once at most, and has it from then on.

In the light load workers are without a row now and then. A request may still wait beside one, for the next step of the
worker that has its prefix: a step's time at most, and computing the prefix anew takes several. At the end a worker
joins a cell with a queue.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.cell import ROOT, Cell, model_folder
from bench.client import Server, Timing, find_model, run_closed_loop, send
from bench.compare import CompareSettings, run_comparison
from bench.lanes import Sample, Samples, busy_share, mean_rows, steady_part, waits_beside_idle
from bench.report import Finding, at_least, at_most, never, say
from bench.watch import Watch
from bench.workload import Job, Lengths, Workload

NUMBERS_OF_WORKERS = (2, 4)
CLIENTS_PER_WORKER = 6
NUM_JOBS = 36  # for each worker
VOCAB_SIZE = 49000
PREFIX_TOKENS, BLOCK_SIZE = 1000, 16
PREFIX_HIT_TOKENS = PREFIX_TOKENS // BLOCK_SIZE * BLOCK_SIZE  # what whole blocks hold of it
OUTPUT_TOKENS = Lengths(32, 96)
FIRST = Workload(8, Lengths(64, 64), Lengths(8, 8), vocab_size=VOCAB_SIZE)
JOIN_ROWS, JOIN_JOBS = 6, 2000
POLL_S = 0.05


def make_jobs(num_jobs: int, seed: int) -> tuple[list[Job], list[int]]:
    """Return jobs in random order, and the positions of those with the prefix."""
    own = Workload(num_jobs // 2, Lengths(32, 384), OUTPUT_TOKENS, vocab_size=VOCAB_SIZE).jobs(0, 2 * seed)
    shared = Workload(
        num_jobs // 2, Lengths(8, 64), OUTPUT_TOKENS, shared_prefix_tokens=PREFIX_TOKENS, vocab_size=VOCAB_SIZE
    ).jobs(1, 2 * seed + 1)
    order = random.Random(2).sample(range(num_jobs), num_jobs)
    jobs = [*own, *shared]
    return [jobs[idx] for idx in order], [position for position, idx in enumerate(order) if idx >= len(own)]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one cell's loads gave."""

    busy_share: float
    rows_ratio: float
    num_computed_per_worker: float
    found_share: float
    num_waits: float  # beside an idle worker, longer than a step; in both loads


def prefix_figures(timings: Sequence[Timing], num_workers: int) -> tuple[float, float]:
    """Return how often each worker computed the prefix, and what share of it requests found after the first ones.

    The first ones are as many as clients there are: they come at once, when nobody has it.
    """
    num_computed = sum(timing.num_cached_tokens < PREFIX_HIT_TOKENS for timing in timings)
    in_order = sorted(timings, key=lambda timing: timing.chunk_times_s[0])
    later = in_order[CLIENTS_PER_WORKER * num_workers :]
    num_found = sum(min(timing.num_cached_tokens, PREFIX_HIT_TOKENS) for timing in later)
    say(f"  {len(timings)} requests with the prefix: {num_computed} computed some of it")
    return num_computed / num_workers, num_found / len(later) / PREFIX_HIT_TOKENS


def num_long_waits(samples: Sequence[Sample]) -> int:
    """Return how often a request waits beside an idle worker for longer than a step."""
    waits = waits_beside_idle(samples)
    for wait in waits:
        say(f"  a request waits {wait.duration_s:.2f} s beside an idle worker; steps up to {wait.longest_step_s:.2f} s")
    return sum(not wait.is_for_a_step for wait in waits)


async def say_first(server: Server, num_workers: int, seed: int) -> None:
    """Tell the time to the first token of the very first request, and of some after it."""
    async with server.client() as client:
        first, *later = [(await send(client, server, job)).ttft_s for job in FIRST.jobs(0, seed)]
    say(f"{num_workers} idle workers: first token of the first request after {1e3 * first:.0f} ms, of others")
    say(f"  with as many tokens, one at a time, after {1e3 * median(later):.0f} ms (median)")


async def measure_cell(settings: CompareSettings, num_workers: int, seed: int) -> Figures:
    """Send both loads to a cell of so many workers."""
    num_clients = CLIENTS_PER_WORKER * num_workers
    jobs, with_prefix = make_jobs(NUM_JOBS * num_workers, seed)
    light_jobs, _ = make_jobs(NUM_JOBS, seed + 1000)
    full, light = Samples(), Samples()
    with Cell(model=settings.model, dtype=settings.dtype, workers=num_workers) as cell:
        server = Server(cell.url, await find_model(cell.url))
        await say_first(server, num_workers, seed)
        with Watch(cell, full.look):
            timings = await run_closed_loop(server, jobs, num_clients)
        with Watch(cell, light.look):
            await run_closed_loop(server, light_jobs, num_workers)
    steady = steady_part(full.seen, num_clients)
    rows = sorted(mean_rows(steady))
    duration_s = steady[-1].time_s - steady[0].time_s
    say(f"  {len(steady)} samples in {duration_s:.1f} s; rows a worker {', '.join(f'{mean:.2f}' for mean in rows)}")
    return Figures(
        busy_share(steady),
        rows[-1] / rows[0],
        *prefix_figures([timings[idx] for idx in with_prefix], num_workers),
        num_waits=num_long_waits(full.seen) + num_long_waits(light.seen),
    )


def findings_of(num_workers: int, figures: Sequence[Figures]) -> list[Finding]:
    """Return what is claimed of a cell of so many workers."""
    name = f"{num_workers} workers: "
    return [
        at_least(name + "share of samples in which all work", [each.busy_share for each in figures], 0.99),
        at_most(name + "mean rows of the fullest / of the emptiest", [each.rows_ratio for each in figures], 1.5),
        at_most(
            name + "times that a worker computes the prefix", [each.num_computed_per_worker for each in figures], 1
        ),
        at_least(name + "share of the prefix found later", [each.found_share for each in figures], 0.99),
        never(name + "waits beside an idle worker, longer than a step", [each.num_waits for each in figures], "waits"),
    ]


async def ready_time_s(worker: asyncio.subprocess.Process) -> float:
    """Return when a worker said that it is ready, and begins to register."""
    assert worker.stderr is not None
    async for line in worker.stderr:
        if b"ready on" in line:
            return time.perf_counter()
    raise RuntimeError("the worker ended before it was ready")


async def start_worker(cell: Cell, settings: CompareSettings) -> asyncio.subprocess.Process:
    """Start one more worker for a cell, of its own."""
    environ = os.environ | {
        "QUIRE_MODEL": await asyncio.to_thread(model_folder, settings.model),
        "QUIRE_DTYPE": settings.dtype,
        "QUIRE_CLUSTER_TOKEN": cell.token,
        "QUIRE_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "worker_svc", "--scheduler", cell.scheduler_address]
    return await asyncio.create_subprocess_exec(*command, env=environ, cwd=ROOT, stderr=subprocess.PIPE)


async def measure_join(settings: CompareSettings, seed: int) -> float:
    """Start a worker beside a full one; return the seconds from where it begins to register to its first row."""
    samples = Samples()
    flags = {"num_threads": 1, "max_num_seqs": JOIN_ROWS}
    with Cell(model=settings.model, dtype=settings.dtype, **flags) as cell:
        server = Server(cell.url, await find_model(cell.url))
        with Watch(cell, samples.look):
            load = asyncio.create_task(run_closed_loop(server, make_jobs(JOIN_JOBS, seed)[0], 2 * JOIN_ROWS))
            worker = await start_worker(cell, settings)
            try:
                ready_s = await ready_time_s(worker)
                while not at_work(samples.seen) and not load.done():  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(POLL_S)
            finally:
                load.cancel()
                await asyncio.gather(load, return_exceptions=True)
                worker.terminate()
                await worker.communicate()
    if not at_work(samples.seen):
        raise RuntimeError("the load ended before the worker had a row")
    return at_work(samples.seen)[0].time_s - ready_s


def at_work(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples in which two workers have rows."""
    return [sample for sample in samples if len(sample.num_rows) == 2 and not sample.idle_workers]


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run each number of workers, then the joining one."""
    findings: list[Finding] = []
    for num_workers in NUMBERS_OF_WORKERS:
        findings += findings_of(
            num_workers, [await measure_cell(settings, num_workers, seed) for seed in range(repeats)]
        )
    joins_s = [await measure_join(settings, seed) for seed in range(repeats)]
    return [*findings, at_most("seconds from a worker's registering to its first row", joins_s, 1.0, "s")]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
