"""Time to first token with and without a cached prefix: 1,024 shared prompt tokens, 32 of each request's own."""

import random

from bench.cell import Cell
from bench.client import Server, find_model, send
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, say, spread
from bench.workload import Job

SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1024, 32, 2
TOKEN_IDS = range(1000, 49000)
LIMIT = 0.25


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Send pairs of requests with the same new prefix: the first finds nothing cached, the second the prefix."""
    rng = random.Random(1)
    cold_s: list[float] = []
    warm_s: list[float] = []
    with Cell(model=settings.model, dtype=settings.dtype) as cell:
        server = Server(cell.url, await find_model(cell.url))
        async with server.client() as client:
            for _ in range(repeats):
                prefix = rng.choices(TOKEN_IDS, k=SHARED_TOKENS)
                for times_s in (cold_s, warm_s):
                    prompt = [*prefix, *rng.choices(TOKEN_IDS, k=OWN_TOKENS)]
                    timing = await send(client, server, Job(prompt, len(prompt), OUTPUT_TOKENS))
                    expected = SHARED_TOKENS if times_s is warm_s else 0
                    assert timing.num_cached_tokens == expected, f"{timing.num_cached_tokens} tokens were cached"
                    times_s.append(timing.ttft_s)
    say(f"time to first token, cold: {spread(cold_s)} s; warm: {spread(warm_s)} s")
    ratios = [warm / cold for warm, cold in zip(warm_s, cold_s, strict=True)]
    return [at_most("time to first token with 1,024 cached prompt tokens / without", ratios, LIMIT)]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=7)
