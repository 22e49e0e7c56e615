"""Clients that leave: their requests end, and every block comes back."""

import asyncio

import httpx

from bench.cell import Cell
from bench.client import Server
from bench.disconnects import is_idle, read_or_leave, reusable_blocks, seconds_until_idle
from bench.workload import Lengths, Workload

STREAMS = Workload(24, Lengths(16, 64), Lengths(16, 32), vocab_size=49000)


async def test_cut_streams_leave_nothing_behind(cell: Cell, model: str) -> None:
    server = Server(cell.url, model)
    at_start = reusable_blocks(cell.stats())
    severe_at_start = cell.severe_lines()
    async with server.client() as client, asyncio.TaskGroup() as group:
        for position, job in enumerate(STREAMS.jobs(lengths_seed=1)):
            group.create_task(read_or_leave(client, server, job, leaves=position % 2 == 1))
    await seconds_until_idle(cell)
    assert is_idle(cell.stats())
    assert reusable_blocks(cell.stats()) == at_start
    assert cell.severe_lines() == severe_at_start


async def test_client_that_leaves_before_the_first_token(cell: Cell, model: str) -> None:
    before = cell.stats()
    body = {"model": model, "prompt": [1000] * 2000, "max_tokens": 500, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cell.url) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        while not cell.stats().num_running_seqs:
            await asyncio.wait([request], timeout=0.01)
            assert not request.done()
        request.cancel()
        await asyncio.wait([request])
    await seconds_until_idle(cell)
    after = cell.stats()
    assert is_idle(after)
    assert reusable_blocks(after) == reusable_blocks(before)
    assert after.num_output_tokens_total == before.num_output_tokens_total
