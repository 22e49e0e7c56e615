"""The scheduler killed under load: requests that fail, and what is still served from cache in the minute after.

Clients send one prompt after the other, with shared prefixes, to a cell whose cache is full: blocks that nobody came
back for are evicted all the time. A warm-up and a minute later the scheduler gets SIGKILL, and the supervisor starts it
again; workers keep their blocks, and tell the new scheduler of them. A minute's share of cached tokens is that of the
requests which clients sent in it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import httpx
from pydantic import Field
from pydantic_settings import CliApp

from bench.cell import Cell
from bench.client import Server, ServerError, Timing, find_model, send
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_least, at_most, say
from bench.workload import Job, Lengths, Workload

NUMBERS_OF_WORKERS = (1, 2)
NUM_CLIENTS = 8
# Prefixes take 12 of the 22 thousand tokens that the caches of two workers hold in bfloat16.
WORKLOAD = Workload(
    8192, Lengths(16, 160), Lengths(16, 48), shared_prefix_tokens=512, num_prefixes=12, vocab_size=49000
)
CACHE = "256MiB"  # of each worker
NUM_WARM_UP = 96  # requests


class RestartSettings(CompareSettings):
    """Flags of this comparison."""

    minute_s: float = Field(60.0, gt=0, description="seconds before and after the kill that are compared")


@dataclass(slots=True)
class Load:
    """What clients see, from the first request to the last."""

    timings: list[Timing] = field(default_factory=list)  # of requests that have ended
    errors: list[str] = field(default_factory=list)
    is_over: bool = False

    async def send_jobs(self, client: httpx.AsyncClient, server: Server, jobs: Iterator[Job]) -> None:
        """Send jobs one after the other until the load is over."""
        for job in jobs:
            if self.is_over:
                return
            try:
                self.timings.append(await send(client, server, job))
            except (ServerError, httpx.HTTPError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
        raise RuntimeError("there were not jobs enough")


def cached_share(timings: Sequence[Timing], begin_s: float, end_s: float) -> float:
    """Return the share of cached prompt tokens of the requests sent between two times."""
    sent = [timing for timing in timings if begin_s <= timing.begin_s < end_s]
    return sum(timing.num_cached_tokens for timing in sent) / sum(timing.num_prompt_tokens for timing in sent)


def silence_s(timings: Sequence[Timing], killed_s: float) -> float:
    """Return the seconds from the kill to the end of the longest time after it in which no stream gave a token.

    A token or two may still be on the way when the scheduler ends; they do not count as the first after it.
    """
    times_s = sorted(time_s for timing in timings for time_s in timing.chunk_times_s if time_s >= killed_s)
    _, end_s = max(pairwise([killed_s, *times_s]), key=lambda pair: pair[1] - pair[0])
    return end_s - killed_s


async def measure_cell(
    settings: CompareSettings, minute_s: float, num_workers: int, seed: int
) -> tuple[float, float, float, float]:
    """Kill the scheduler of a cell; return the minutes' cached shares, seconds to the first token, failed requests."""
    load = Load()
    jobs = iter(WORKLOAD.jobs(0, content_seed=seed))
    with Cell(model=settings.model, dtype=settings.dtype, workers=num_workers, kv_cache_memory=CACHE) as cell:
        server = Server(cell.url, await find_model(cell.url))
        async with server.client() as client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(load.send_jobs(client, server, jobs))
            while len(load.timings) < NUM_WARM_UP:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.1)
            await asyncio.sleep(minute_s)
            stats = cell.stats()
            os.kill(cell.service_pid("scheduler_svc"), signal.SIGKILL)
            killed_s = time.perf_counter()
            await asyncio.sleep(minute_s)
            load.is_over = True
        later_stats = cell.stats()
    before = cached_share(load.timings, killed_s - minute_s, killed_s)
    after = cached_share(load.timings, killed_s, killed_s + minute_s)
    first_token_s = silence_s(load.timings, killed_s)
    say(
        f"{num_workers} workers: cached {before:.1%} before, {after:.1%} after; next token {first_token_s:.2f} s after "
        f"the kill; {len(load.timings)} requests, {len(load.errors)} failed; blocks evicted: "
        f"{stats.num_evicted_blocks_total}, then {later_stats.num_evicted_blocks_total}"
    )
    for error in load.errors[:5]:
        say(error)
    return before, after, first_token_s, float(len(load.errors))


async def measure(settings: CompareSettings, repeats: int, minute_s: float) -> list[Finding]:
    """Kill schedulers of cells of different size."""
    findings = []
    for num_workers in NUMBERS_OF_WORKERS:
        figures = [await measure_cell(settings, minute_s, num_workers, seed) for seed in range(repeats)]
        before, after, first_token_s, num_failed = zip(*figures, strict=True)
        name = f"{num_workers} workers"
        findings += [
            at_least(f"{name}: cached share before the kill", before, 0.5),
            at_least(
                f"{name}: cached share after / before",
                [one / other for one, other in zip(after, before, strict=True)],
                0.9,
            ),
            at_most(f"{name}: requests that failed", num_failed, 0, "requests"),
            at_most(f"{name}: seconds from the kill to the next token", first_token_s, 10.0, "s"),
        ]
    return findings


if __name__ == "__main__":
    chosen = CliApp.run(RestartSettings)
    run_comparison(partial(measure, minute_s=chosen.minute_s), default_repeats=1, settings=chosen)
