"""Redis killed and started again while a cell serves: requests that fail, prefix hit rate before, during and after.

Clients send prompts that share prefixes, at a fixed concurrency, in three rounds of the same size: with Redis, with
Redis killed (kill -9, once the round has begun), and with Redis started again (likewise). Each round has prefixes of
its own, so each has to find what it itself has cached.
"""

import asyncio
from collections.abc import Callable
from statistics import median

from bench.cell import Cell
from bench.client import Server, ServerError, Timing, find_model, send
from bench.compare import CompareSettings, run_comparison
from bench.redis_server import RedisServer
from bench.report import Finding, always_at_least, at_least, never, percentile, say
from bench.workload import Job, Lengths, Workload

WORKLOAD = Workload(48, Lengths(16, 32), Lengths(16, 32), shared_prefix_tokens=256, num_prefixes=6, vocab_size=49000)
CONCURRENCY = 8
ACT_AFTER = 8  # requests of a round
SETTLED_S = 60.0
POLL_S = 0.05

ROUNDS = ("before", "during", "after")


async def run_round(server: Server, jobs: list[Job], act: Callable[[], None]) -> tuple[list[Timing], list[str]]:
    """Send a round's jobs and do something to Redis in its midst; return timings, and what went wrong."""
    gate = asyncio.Semaphore(CONCURRENCY)
    num_done = 0
    timings: list[Timing] = []
    errors: list[str] = []

    async def send_when_free(job: Job) -> None:
        nonlocal num_done
        async with gate:
            try:
                timings.append(await send(client, server, job))
            except ServerError as error:
                errors.append(f"{type(error).__name__}: {error}")
        num_done += 1
        if num_done == ACT_AFTER:
            await asyncio.to_thread(act)

    async with server.client() as client, asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(send_when_free(job))
    return timings, errors


async def wait_until_settled(cell: Cell) -> bool:
    """Return whether the index is whole again within SETTLED_S: Redis is there and has been told everything."""
    for _ in range(int(SETTLED_S / POLL_S)):
        index = (await asyncio.to_thread(cell.stats)).shared_index
        if index.up and not index.num_pending_writes:
            return True
        await asyncio.sleep(POLL_S)
    return False


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run the three rounds, again and again."""
    hit_rates: dict[str, list[float]] = {name: [] for name in ROUNDS}
    ttft_ms: dict[str, list[float]] = {name: [] for name in ROUNDS}
    num_failed, published = [], []
    with RedisServer() as redis, Cell(model=settings.model, dtype=settings.dtype, redis_url=redis.url) as cell:
        server = Server(cell.url, await find_model(cell.url))
        acts = {"before": lambda: None, "during": redis.kill, "after": redis.start}
        for repeat in range(repeats):
            failures = []
            for number, name in enumerate(ROUNDS):
                jobs = WORKLOAD.jobs(0, content_seed=3 * repeat + number)
                timings, errors = await run_round(server, jobs, acts[name])
                failures += errors
                num_prompt_tokens = sum(timing.num_prompt_tokens for timing in timings)
                hit_rates[name].append(sum(timing.num_cached_tokens for timing in timings) / num_prompt_tokens)
                ttft_ms[name].append(1e3 * percentile([timing.ttft_s for timing in timings], 0.5))
            is_whole = await wait_until_settled(cell)
            stats = cell.stats()
            num_keys = len(redis.ask("KEYS", "quire:1:block:*"))
            num_blocks = sum(lane.num_cached_blocks for lane in stats.lanes)
            num_failed.append(float(len(failures)))
            # A block with two copies has one key.
            published.append(num_keys / num_blocks if is_whole else 0.0)
            say(f"repeat {repeat + 1}: {len(failures)} failed, {num_keys} of {num_blocks} cached blocks in Redis again")
            for failure in failures:
                say(failure)
        index = stats.shared_index
        say(f"{index.num_outages_total} outages, {index.num_republishes_total} times everything was published again")
        for line in cell.severe_lines():
            say(line)
    for name in ROUNDS:
        say(f"{name}: hit rate {median(hit_rates[name]):.1%}, time to first token p50 {median(ttft_ms[name]):.0f} ms")
    return [
        never("requests that failed", num_failed, "requests"),
        always_at_least("keys in Redis after its return / cached blocks", published, 0.99),
        *(
            at_least(
                f"hit rate {name} / before",
                [rate / before for rate, before in zip(hit_rates[name], hit_rates["before"], strict=True)],
                0.95,
            )
            for name in ROUNDS[1:]
        ),
    ]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=3)
