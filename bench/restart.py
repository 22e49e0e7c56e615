"""The scheduler killed under load: requests that fail, and what is still served from cache in the minute after.

Clients send one prompt after the other, with shared prefixes, to a cell whose cache is full: blocks that nobody came
back for are evicted all the time. A warm-up and a minute later the scheduler gets SIGKILL, and the supervisor starts it
again; workers keep their blocks, and tell the new scheduler of them. A minute's share of cached tokens is that of the
requests which clients sent in it. A cache that was lost would soon be full again, so the first request with each prefix
after the kill counts for itself too: whole caches serve nearly all of these (a prefix or two may have been evicted),
after a loss half or so, with prefixes that streams under way brought back.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import aiohttp
from pydantic import Field
from pydantic_settings import CliApp

from bench.cell import Cell
from bench.client import Server, ServerError, Timing, find_model, send
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_least, at_most, never, say
from bench.workload import Job, Lengths, Workload

NUMBERS_OF_WORKERS = (1, 2)
NUM_CLIENTS = 8
PREFIX_TOKENS, NUM_PREFIXES = 512, 12
WORKLOAD = Workload(8192, Lengths(16, 160), Lengths(16, 48), PREFIX_TOKENS, num_prefixes=NUM_PREFIXES, vocab_size=49000)
CACHE = "256MiB"  # of each worker: 11,000 tokens in bfloat16, of which the prefixes take 6,000
NUM_WARM_UP = 96  # requests


class RestartSettings(CompareSettings):
    """Flags of this comparison."""

    minute_s: float = Field(60.0, gt=0, description="seconds before and after the kill that are compared")


@dataclass(slots=True)
class Load:
    """What clients see, from the first request to the last."""

    answered: list[tuple[Job, Timing]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    is_over: bool = False

    async def send_jobs(self, client: aiohttp.ClientSession, server: Server, jobs: Iterator[Job]) -> None:
        """Send jobs one after the other until the load is over."""
        for job in jobs:
            if self.is_over:
                return
            try:
                self.answered.append((job, await send(client, server, job)))
            except ServerError as error:
                self.errors.append(f"{type(error).__name__}: {error}")
        raise RuntimeError("there were not jobs enough")


def cached_share(timings: Sequence[Timing], begin_s: float, end_s: float) -> float:
    """Return the share of cached prompt tokens of the requests sent between two times."""
    sent = [timing for timing in timings if begin_s <= timing.begin_s < end_s]
    return sum(timing.num_cached_tokens for timing in sent) / sum(timing.num_prompt_tokens for timing in sent)


def found_at_first(answered: Sequence[tuple[Job, Timing]], begin_s: float) -> float:
    """Return the share of the prefixes that the first request with each, sent after `begin_s`, found cached."""
    first: dict[tuple[str | int, ...], Timing] = {}
    for job, timing in sorted(answered, key=lambda pair: pair[1].begin_s):
        if timing.begin_s >= begin_s:
            first.setdefault(tuple(job.prompt[:PREFIX_TOKENS]), timing)
    return sum(min(timing.num_cached_tokens, PREFIX_TOKENS) for timing in first.values()) / PREFIX_TOKENS / len(first)


def silence_s(timings: Sequence[Timing], killed_s: float) -> float:
    """Return the seconds from the kill to the end of the longest time after it in which no stream gave a token.

    A token or two may still be on the way when the scheduler ends; they do not count as the first after it.
    """
    times_s = sorted(time_s for timing in timings for time_s in timing.chunk_times_s if time_s >= killed_s)
    _, end_s = max(pairwise([killed_s, *times_s]), key=lambda pair: pair[1] - pair[0])
    return end_s - killed_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What one kill gave."""

    cached_before: float
    cached_after: float
    found_at_first: float
    next_token_s: float
    num_failed: float

    @classmethod
    def of(cls, load: Load, killed_s: float, minute_s: float) -> "Figures":
        """Return the figures of a load whose scheduler was killed at `killed_s`."""
        timings = [timing for _, timing in load.answered]
        return cls(
            cached_share(timings, killed_s - minute_s, killed_s),
            cached_share(timings, killed_s, killed_s + minute_s),
            found_at_first(load.answered, killed_s),
            silence_s(timings, killed_s),
            float(len(load.errors)),
        )


async def measure_cell(settings: CompareSettings, minute_s: float, num_workers: int, seed: int) -> Figures:
    """Kill the scheduler of a cell under load."""
    load = Load()
    jobs = iter(WORKLOAD.jobs(0, content_seed=seed))
    with Cell(model=settings.model, dtype=settings.dtype, workers=num_workers, kv_cache_memory=CACHE) as cell:
        server = Server(cell.url, await find_model(cell.url))
        async with server.client() as client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(load.send_jobs(client, server, jobs))
            while len(load.answered) < NUM_WARM_UP:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.1)
            await asyncio.sleep(minute_s)
            num_evicted = (await asyncio.to_thread(cell.stats)).num_evicted_blocks_total
            os.kill(cell.service_pid("scheduler_svc"), signal.SIGKILL)
            killed_s = time.perf_counter()
            await asyncio.sleep(minute_s)
            load.is_over = True
        num_evicted_later = cell.stats().num_evicted_blocks_total
    figures = Figures.of(load, killed_s, minute_s)
    say(
        f"{num_workers} worker(s), {len(load.answered)} requests: {figures.cached_before:.1%} of prompt tokens cached "
        f"before, {figures.cached_after:.1%} after; blocks evicted before {num_evicted}, after {num_evicted_later}"
    )
    for error in load.errors[:5]:
        say(error)
    return figures


async def measure(settings: CompareSettings, repeats: int, minute_s: float) -> list[Finding]:
    """Kill schedulers of cells of different size."""
    findings: list[Finding] = []
    for num_workers in NUMBERS_OF_WORKERS:
        figures = [await measure_cell(settings, minute_s, num_workers, seed) for seed in range(repeats)]
        name = f"{num_workers} worker(s): "
        findings += [
            at_least(name + "cached share before the kill", [each.cached_before for each in figures], 0.5),
            at_least(
                name + "cached share after / before", [each.cached_after / each.cached_before for each in figures], 0.9
            ),
            at_least(
                name + "share of each prefix that the first request after finds",
                [each.found_at_first for each in figures],
                0.75,
            ),
            never(name + "requests that failed", [each.num_failed for each in figures], "requests"),
            at_most(name + "seconds from the kill to the next token", [each.next_token_s for each in figures], 10, "s"),
        ]
    return findings


if __name__ == "__main__":
    chosen = CliApp.run(RestartSettings)
    run_comparison(partial(measure, minute_s=chosen.minute_s), default_repeats=1, settings=chosen)
