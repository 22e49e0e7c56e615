"""What another's backlog costs a tenant with one request: its time to first token, against the same in an idle cell.

One tenant has 500 requests at once. While they wait and run another sends one request after the other, each with a
prompt that nobody had before.
"""

import asyncio
import random

from bench.cell import Cell
from bench.client import Server, find_model, send
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, say, spread
from bench.workload import Job, Lengths, Workload

NUM_REQUESTS = 500
BACKLOG = Workload(NUM_REQUESTS, Lengths(64, 512), Lengths(16, 64), vocab_size=49000)
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 2  # of the one
TOKEN_IDS = range(1000, 49000)
LIMIT = 3.0


async def _ttfts_s(server: Server, rng: random.Random, repeats: int) -> list[float]:
    """Send requests one after the other; return the time to first token of each."""
    times_s = []
    async with server.client() as client:
        for _ in range(repeats):
            job = Job(rng.choices(TOKEN_IDS, k=PROMPT_TOKENS), PROMPT_TOKENS, OUTPUT_TOKENS)
            times_s.append((await send(client, server, job)).ttft_s)
    return times_s


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Measure in the idle cell, then beside the backlog, as long as some of it waits."""
    rng = random.Random(1)
    with Cell(model=settings.model, dtype=settings.dtype) as cell:
        model = await find_model(cell.url)
        many, one = Server(cell.url, model, tenant="many"), Server(cell.url, model, tenant="one")
        await _ttfts_s(one, rng, 1)  # a first request finds caches cold
        idle_s = await _ttfts_s(one, rng, repeats)
        async with many.client() as client:
            backlog = [asyncio.create_task(send(client, many, job)) for job in BACKLOG.jobs(1)]
            try:
                done, _ = await asyncio.wait(backlog, return_when=asyncio.FIRST_COMPLETED)
                done.pop().result()
                loaded_s = await _ttfts_s(one, rng, repeats)
                stats = cell.stats()
            finally:
                for task in backlog:
                    task.cancel()
                await asyncio.gather(*backlog, return_exceptions=True)
        assert stats.num_waiting_seqs, "the backlog was served before the end: it measures nothing"
    say(f"time to first token, idle: {spread(idle_s)} s; beside {len(backlog)} requests: {spread(loaded_s)} s")
    say(f"at the end {stats.num_waiting_seqs} requests waited and {stats.num_running_seqs} ran")
    ratios = [loaded / idle for loaded, idle in zip(loaded_s, idle_s, strict=True)]
    return [at_most("time to first token beside another tenant's 500 requests / in an idle cell", ratios, LIMIT)]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=7)
