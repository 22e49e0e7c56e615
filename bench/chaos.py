"""Streams while workers, scheduler and Redis are killed, stopped and cut off at random: nothing may be lost.

Each request has the very text of an undisturbed run: float32, native KV, fixed seeds. In the end nothing runs, nothing
waits, and every block is free or cached. Reported besides: the longest gaps in streams.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from bench.cell_parts import FAULTS, CellParts
from bench.client import find_model
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, never, percentile, say
from protos import scheduler_pb2

DURATION_S = 600.0
NUM_WORKERS = 3
NUM_CLIENTS = 8
NUM_REQUESTS = 24  # different ones
PAUSE_S = (2.0, 8.0)
SETTLE_S = 90.0
SETTINGS = {"QUIRE_DTYPE": "float32", "QUIRE_KV_CACHE_MEMORY": "128MiB", "QUIRE_MAX_NUM_BATCHED_TOKENS": "128"}
TOKEN_IDS = range(1000, 49000)


@dataclass(frozen=True, slots=True)
class Request:
    """A completion whose text depends on nothing but these."""

    prompt: list[int]
    num_output_tokens: int
    temperature: float
    seed: int

    def body(self, model: str) -> dict[str, object]:
        """Return it as JSON."""
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.num_output_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def make_requests(count: int) -> list[Request]:
    """Return requests of mixed lengths; half are greedy, and a third begins with a common prefix."""
    rng = random.Random(5)
    prefix = rng.choices(TOKEN_IDS, k=96)
    return [
        Request(
            [*(prefix if number % 3 == 0 else ()), *rng.choices(TOKEN_IDS, k=rng.randint(8, 200))],
            rng.randint(24, 128),
            0.0 if number % 2 else 0.8,
            number,
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class Outcome:
    """What clients saw."""

    num_requests: int = 0
    wrong_texts: list[str] = field(default_factory=list)  # where they part from the right ones
    num_wrong_counts: int = 0
    errors: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # the longest of each stream, its first token's wait included
    num_faults: Counter[str] = field(default_factory=Counter)


async def read(client: httpx.AsyncClient, model: str, request: Request) -> tuple[str, int, float]:
    """Return a request's text, its number of output tokens and the longest wait for a piece of it.

    Raises httpx.HTTPError, or RuntimeError for what else a client calls an error.
    """
    text, num_tokens, longest_s, last_s = "", 0, 0.0, time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=request.body(model)) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(line)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            text += "".join(choice["text"] for choice in event["choices"])
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return text, num_tokens, longest_s


async def undisturbed_texts(url: str, model: str, requests: Sequence[Request]) -> list[str]:
    """Return the text of each request."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        gate = asyncio.Semaphore(NUM_CLIENTS)

        async def one(request: Request) -> str:
            async with gate:
                return (await read(client, model, request))[0]

        return await asyncio.gather(*map(one, requests))


async def run_chaos(
    cell: CellParts,
    requests: Sequence[Request],
    duration_s: float,
    seed: int,
    pause_s: tuple[float, float] = PAUSE_S,
) -> Outcome:
    """Send requests again and again for `duration_s` while faults happen; return when the last has been answered.

    Between one fault's end and the next passes a time between the two of `pause_s`.
    """
    model = await find_model(cell.url)
    texts = await undisturbed_texts(cell.url, model, requests)
    outcome = Outcome()
    end_s = time.monotonic() + duration_s

    async def ask(client: httpx.AsyncClient, client_idx: int) -> None:
        rng = random.Random(seed * 1000 + client_idx)
        while time.monotonic() < end_s:
            idx = rng.randrange(len(requests))
            outcome.num_requests += 1
            try:
                text, num_tokens, gap_s = await read(client, model, requests[idx])
            except (httpx.HTTPError, RuntimeError) as error:
                outcome.errors.append(f"{type(error).__name__}: {error}")
                continue
            if text != texts[idx]:
                outcome.wrong_texts.append(_difference(idx, text, texts[idx]))
            outcome.num_wrong_counts += num_tokens != requests[idx].num_output_tokens
            outcome.gaps_s.append(gap_s)

    async def hurt() -> None:
        rng = random.Random(seed)
        names = list(FAULTS)
        while time.monotonic() < end_s:
            await asyncio.sleep(rng.uniform(*pause_s))
            if not names:
                names = list(FAULTS)
            name = names.pop(rng.randrange(len(names)))  # each comes once before any comes again
            outcome.num_faults[name] += 1
            await FAULTS[name](cell, rng)

    async with httpx.AsyncClient(base_url=cell.url, timeout=None) as client, asyncio.TaskGroup() as group:
        group.create_task(hurt())
        for client_idx in range(NUM_CLIENTS):
            group.create_task(ask(client, client_idx))
    return outcome


def _difference(idx: int, text: str, expected: str) -> str:
    start = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if len(set(pair)) == 2), 0)
    rest, expected_rest = text[start : start + 40], expected[start : start + 40]
    return f"request {idx}, from character {start} of {len(expected)}: {rest!r}, not {expected_rest!r}"


async def blocks_lost(cell: CellParts) -> int:
    """Return how many blocks are neither free nor cached once nothing runs any more; -1 when something still does."""
    deadline_s = time.monotonic() + SETTLE_S
    stats = await cell.stats()
    while not _is_settled(stats, len(cell.workers)):
        if time.monotonic() > deadline_s:
            return -1
        await asyncio.sleep(0.2)
        stats = await cell.stats()
    return sum(lane.num_blocks - lane.num_free_blocks - lane.num_cached_blocks for lane in stats.lanes)


def _is_settled(stats: scheduler_pb2.CellStats, num_workers: int) -> bool:
    is_idle = not (stats.num_running_seqs or stats.num_waiting_seqs)
    return is_idle and len(stats.lanes) == num_workers and not any(lane.num_steps_in_flight for lane in stats.lanes)


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run the chaos."""
    findings = []
    for seed in range(1, repeats + 1):
        async with CellParts(settings.model, NUM_WORKERS, SETTINGS) as cell:
            outcome = await run_chaos(cell, make_requests(NUM_REQUESTS), DURATION_S, seed)
            lost = await blocks_lost(cell)
        say(f"{outcome.num_requests} requests; " + ", ".join(f"{name} {n} x" for name, n in outcome.num_faults.items()))
        say(
            f"longest gap of a stream: p50 {percentile(outcome.gaps_s, 0.5):.2f} s, p99 "
            f"{percentile(outcome.gaps_s, 0.99):.2f} s, most {max(outcome.gaps_s):.2f} s"
        )
        for line in (*outcome.errors[:5], *outcome.wrong_texts[:5]):
            say(line)
        findings += [
            never("errors that clients saw", [float(len(outcome.errors))], "errors"),
            never("texts that differ from an undisturbed run", [float(len(outcome.wrong_texts))], "texts"),
            never("streams with a token missing or twice", [float(outcome.num_wrong_counts)], "streams"),
            never("blocks lost", [abs(float(lost))], "blocks"),
        ]
    return findings


if __name__ == "__main__":
    # uvloop starts no processes in groups of their own, as the supervisor does.
    run_comparison(measure, default_repeats=1, loop_factory=asyncio.new_event_loop)
