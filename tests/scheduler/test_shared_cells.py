"""Whole cells that share a Redis: it is filled by what they serve, and what befalls it is nothing to their requests."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from protos import scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler_svc.timing import IndexTiming

from .conftest import TIMING as SHORT
from .conftest import LoopbackCell, until
from .fake_worker import expected_output
from .redis_servers import RedisServer, RedisServers
from .shared_indexes import PATIENT, TIMING, collect_connections, settled

PROMPT = list(range(10, 110))
NUM_BLOCKS = 6  # full ones of the prompt


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    servers = RedisServers(tmp_path)
    yield servers.start()
    servers.kill()


@asynccontextmanager
async def sharing_cell(
    server: RedisServer, name: str, index_timing: IndexTiming = TIMING
) -> AsyncIterator[LoopbackCell]:
    """Yield a cell with one worker, named after it, and one gateway."""
    cell = LoopbackCell()
    await cell.start(index_timing=index_timing, redis_url=server.url, cell_name=name)
    try:
        await cell.add_worker(instance_id=f"{name}-worker")
        await cell.add_gateway()
        yield cell
    finally:
        await cell.stop()
        collect_connections()
        cell.check()


async def ask(cell: LoopbackCell, request_id: str, prompt: list[int], max_tokens: int = 5) -> None:
    """Have a request answered and check the answer."""
    (gateway,) = cell.gateways
    await gateway.submit(request_id, prompt, max_tokens=max_tokens)
    await until(lambda: gateway.output(request_id).has_ended)
    assert gateway.output(request_id).token_ids == expected_output(prompt, max_tokens)


def figures(cell: LoopbackCell) -> scheduler_pb2.SharedIndexStats:
    return cell.server.figures().shared_index


async def is_settled(cell: LoopbackCell) -> None:
    assert cell.server.shared_index is not None
    await settled(cell.server.shared_index)


def num_keys(server: RedisServer) -> int:
    return len(server.ask("KEYS", "quire:1:block:*"))


async def test_what_a_cell_computes_is_in_redis(server: RedisServer) -> None:
    async with sharing_cell(server, "one") as cell:
        await ask(cell, "a", PROMPT)
        await is_settled(cell)
        assert num_keys(server) == NUM_BLOCKS
        async with grpc.aio.insecure_channel(cell.address) as channel:
            stats = await SchedulerStub(channel).GetStats(scheduler_pb2.GetStatsRequest())
        assert stats.shared_index.up
        assert stats.shared_index.num_writes_total >= NUM_BLOCKS
        assert (stats.shared_index.num_live_instances, stats.shared_index.num_live_cells) == (1, 1)


async def test_cell_without_redis_says_nothing_of_it(cell: LoopbackCell) -> None:
    await cell.start()
    assert not cell.server.figures().HasField("shared_index")


async def test_cell_learns_that_another_holds_the_prefix(server: RedisServer) -> None:
    async with sharing_cell(server, "one") as one, sharing_cell(server, "two") as two:
        await ask(one, "a", PROMPT)
        await is_settled(one)
        await until(lambda: figures(two).num_live_cells == 2)
        (worker,), (gateway,) = two.workers, two.gateways
        worker.may_step.clear()  # so that the look-up is answered before this cell holds the prefix too
        await gateway.submit("a", PROMPT, max_tokens=5)
        await until(lambda: figures(two).num_longer_elsewhere_total == 1)
        worker.may_step.set()
        await until(lambda: gateway.output("a").has_ended)
        await ask(two, "b", PROMPT)
        await until(lambda: figures(two).num_lookups_total == 2)
        assert figures(two).num_longer_elsewhere_total == 1, "now it holds the prefix itself"


async def test_tenants_do_not_see_one_another_in_redis(server: RedisServer) -> None:
    async with sharing_cell(server, "one") as one, sharing_cell(server, "two") as two:
        await ask(one, "a", PROMPT)
        await is_settled(one)
        await until(lambda: figures(two).num_live_cells == 2)
        (gateway,) = two.gateways
        await gateway.submit("a", PROMPT, max_tokens=1, tenant="another")
        await until(lambda: figures(two).num_lookups_total == 1)
        await until(lambda: gateway.output("a").has_ended)
        assert figures(two).num_longer_elsewhere_total == 0


async def test_requests_do_not_notice_that_redis_is_killed_and_started_again(server: RedisServer) -> None:
    async with sharing_cell(server, "one") as cell:
        for round_number, act in enumerate((lambda: None, server.kill, server.start)):
            act()
            await asyncio.gather(
                *(ask(cell, f"{round_number}-{i}", [round_number, i, *PROMPT], max_tokens=40) for i in range(10))
            )
        await is_settled(cell)
        assert figures(cell).num_outages_total == 1
        assert num_keys(server) == cell.server.figures().lanes[0].num_cached_blocks


async def test_requests_do_not_wait_for_a_redis_that_hangs(server: RedisServer) -> None:
    async with sharing_cell(server, "one", PATIENT) as one, sharing_cell(server, "two", PATIENT) as two:
        await until(lambda: figures(one).num_live_cells == 2)
        server.pause()
        await asyncio.gather(*(ask(one, str(i), [i, *PROMPT], max_tokens=10) for i in range(10)))
        server.resume()
        await is_settled(one)
        await is_settled(two)


async def test_index_is_whole_again_after_the_scheduler_was_started_anew(server: RedisServer) -> None:
    cell = LoopbackCell()
    await cell.start(index_timing=TIMING, redis_url=server.url)
    worker = await cell.add_worker()
    await cell.add_gateway()
    await ask(cell, "a", PROMPT)
    await is_settled(cell)
    await cell.server.stop()
    worker.fall_silent()
    server.ask("FLUSHALL")

    await cell.start(index_timing=TIMING, redis_url=server.url)
    await worker.join(cell.address)
    await until(lambda: cell.is_live(worker))
    await is_settled(cell)
    assert num_keys(server) == NUM_BLOCKS
    await cell.stop()
    cell.check()


async def test_restarted_scheduler_binds_nothing_before_its_workers_are_back(server: RedisServer) -> None:
    cell = LoopbackCell()
    await cell.start(index_timing=TIMING, redis_url=server.url, cell_name="one")
    holder = await cell.add_worker()
    await cell.add_gateway()
    await ask(cell, "a", PROMPT)
    other = await cell.add_worker()
    index = cell.server.shared_index
    assert index is not None
    await until(lambda: len(index.live) == 2)
    await cell.server.stop()
    for worker in (holder, other):
        worker.fall_silent()
    num_steps = other.num_steps

    # The limit is not what ends the waiting here.
    await cell.start(replace(SHORT, rejoin_ms=60_000), index_timing=TIMING, redis_url=server.url, cell_name="one")
    await until(lambda: figures(cell).up)
    await other.join(cell.address)
    await until(lambda: cell.is_live(other))
    gateway = await cell.add_gateway("gateway-2")
    await gateway.submit("b", PROMPT, max_tokens=5)
    await until(lambda: cell.num_seqs == 1)
    await holder.join(cell.address)
    await until(lambda: gateway.output("b").has_ended)
    assert gateway.output("b").terminal_runs[0].usage.num_cached_tokens == NUM_BLOCKS * 16
    assert other.num_steps == num_steps
    await cell.stop()
    cell.check()


async def test_restarted_scheduler_does_not_wait_for_workers_that_are_gone(server: RedisServer) -> None:
    cell = LoopbackCell()
    await cell.start(index_timing=TIMING, redis_url=server.url, cell_name="one")
    gone = await cell.add_worker()
    await is_settled(cell)
    await cell.server.stop()
    gone.fall_silent()

    await cell.start(replace(SHORT, rejoin_ms=300), index_timing=TIMING, redis_url=server.url, cell_name="one")
    await until(lambda: figures(cell).up)
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=5)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 5)
    await cell.stop()
    cell.check()


async def test_evicted_blocks_leave_redis(server: RedisServer) -> None:
    cell = LoopbackCell()
    await cell.start(index_timing=TIMING, redis_url=server.url)
    await cell.add_worker(num_slabs=1)
    await cell.add_gateway()
    for i in range(6):
        await ask(cell, str(i), [i, *PROMPT])
    await is_settled(cell)
    lane = cell.server.figures().lanes[0]
    assert cell.server.figures().num_evicted_blocks_total > 0
    assert num_keys(server) == lane.num_cached_blocks
    await cell.stop()
    cell.check()


async def test_wrong_password_and_an_absent_server_stop_nobody(server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "requirepass", "right")
    for url in (server.url, "redis://127.0.0.1:1"):
        cell = LoopbackCell()
        await cell.start(index_timing=TIMING, redis_url=url)
        await cell.add_worker()
        await cell.add_gateway()
        await ask(cell, "a", PROMPT)
        await until(lambda cell=cell: figures(cell).num_outages_total == 1)  # type: ignore[misc]
        assert not figures(cell).up
        await cell.stop()
        cell.check()
