"""Sends jobs to an OpenAI-compatible server as streams and notes when each piece of text came.

It shares the machine with what it measures, so what an event costs here counts: of each step of 8 rows on two cores it
takes 1.1 ms with httpx, 0.6 with aiohttp, 0.4 with aiohttp on uvloop.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.workload import Job

CONNECT_TIMEOUT_S = 30.0


class ServerError(Exception):
    """The server answered with an error, broke off, or could not be reached."""


@dataclass(slots=True)
class Timing:
    """What happened to one request; times are seconds of one monotonic clock."""

    begin_s: float
    chunk_times_s: list[float] = field(default_factory=list)  # when text came, one entry a chunk
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_times_s[0] - self.begin_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between one chunk and the next."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]


Outcome = Timing | ServerError


@dataclass(frozen=True, slots=True)
class Server:
    """Where jobs go. `ignore_eos` is an extension that Quire, vLLM and SGLang know: outputs get their full length."""

    url: str  # up to and without /v1
    model: str
    api_key: str = ""
    ignore_eos: bool = True
    chat: bool = False  # ask for chat completions, with the prompt, a text, as the only message
    tenant: str = ""  # for whom Quire without API keys takes the client

    def client(self) -> aiohttp.ClientSession:
        """Return an HTTP client with as many connections as it takes, and no limit on how long an answer takes."""
        headers = bearer(self.api_key)
        if self.tenant:
            headers["X-Quire-Tenant"] = self.tenant
        return aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, job: Job) -> dict[str, Any]:
        """Return the request of a job."""
        extensions = {"ignore_eos": True} if self.ignore_eos else {}
        prompt = {"messages": [{"role": "user", "content": job.prompt}]} if self.chat else {"prompt": job.prompt}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": job.num_output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extensions,
        }


def bearer(api_key: str) -> dict[str, str]:
    """Return the headers that carry a key, where there is one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def find_model(url: str, api_key: str = "") -> str:
    """Return the name of the first model that the server offers. Raises ServerError."""
    timeout = aiohttp.ClientTimeout(CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=bearer(api_key), timeout=timeout) as client,
            client.get(f"{url}/v1/models") as response,
        ):
            response.raise_for_status()
            name: str = (await response.json())["data"][0]["id"]
            return name
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        raise ServerError(f"{url}/v1/models: {type(error).__name__}: {error}") from error


async def events(client: aiohttp.ClientSession, server: Server, job: Job) -> AsyncGenerator[dict[str, Any]]:
    """Send one job and yield its stream's server-sent events as objects. Raises ServerError.

    The connection is closed when the reader leaves, for which it closes this generator.
    """
    try:
        async with client.post(server.url + server.path, json=server.body(job)) as response:
            if response.status != 200:
                raise ServerError(f"status {response.status}: {await response.text(errors='replace')}")
            async for line in response.content:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise ServerError(json.dumps(event["error"]))
                    yield event
    except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, json.JSONDecodeError) as error:
        raise ServerError(f"{type(error).__name__}: {error}") from error


async def send(client: aiohttp.ClientSession, server: Server, job: Job) -> Timing:
    """Send one job and read its stream to the end. Raises ServerError when it failed, or gave no token."""
    timing = Timing(time.perf_counter())
    async with aclosing(events(client, server, job)) as stream:
        async for event in stream:
            choices = event.get("choices") or []
            if any(_text_of(choice) or choice.get("finish_reason") for choice in choices):
                timing.chunk_times_s.append(time.perf_counter())
            if usage := event.get("usage"):
                timing.num_prompt_tokens = usage["prompt_tokens"]
                timing.num_output_tokens = usage["completion_tokens"]
                timing.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not timing.chunk_times_s or not timing.num_output_tokens:
        raise ServerError("a stream ended without a token, or without its usage")
    return timing


def _text_of(choice: dict[str, Any]) -> str:
    """Return the text that a chunk adds to a choice, of a completion or of a chat."""
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


async def try_closed_loop(server: Server, jobs: Sequence[Job], concurrency: int) -> list[Outcome]:
    """Send the jobs in order, `concurrency` at once: when one ends the next begins. Return what came of each."""
    gate = asyncio.Semaphore(concurrency)

    async def send_when_free(client: aiohttp.ClientSession, job: Job) -> Outcome:
        async with gate:
            return await _try_send(client, server, job)

    async with server.client() as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_when_free(client, job)) for job in jobs]
        await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def try_open_loop(server: Server, jobs: Sequence[Job], requests_per_s: float, seed: int) -> list[Outcome]:
    """Send the jobs at the times of a Poisson process, however many are under way. Return what came of each."""
    rng = random.Random(seed)
    async with server.client() as client, asyncio.TaskGroup() as group:
        tasks = []
        for job in jobs:
            tasks.append(group.create_task(_try_send(client, server, job)))
            await asyncio.sleep(rng.expovariate(requests_per_s))
        await asyncio.wait(tasks)
    return [task.result() for task in tasks]


async def run_closed_loop(server: Server, jobs: Sequence[Job], concurrency: int) -> list[Timing]:
    """Do as `try_closed_loop`; return the timings, in the jobs' order. Raises ServerError when a job failed."""
    timings = []
    for outcome in await try_closed_loop(server, jobs, concurrency):
        if isinstance(outcome, ServerError):
            raise outcome
        timings.append(outcome)
    return timings


async def _try_send(client: aiohttp.ClientSession, server: Server, job: Job) -> Outcome:
    try:
        return await send(client, server, job)
    except ServerError as error:
        return error
