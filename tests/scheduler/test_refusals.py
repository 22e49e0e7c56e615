"""Strangers and replays: each is refused, counted by its reason, and harms nobody who belongs to the cell."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2
from protos.channel import Refusal
from protos.credentials import Credentials
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.certificates import Authority

from .conftest import LoopbackCell, until
from .fake_gateway import FakeGateway
from .fake_worker import FakeWorker, expected_output

PROMPT = range(5, 25)


def refused(cell: LoopbackCell) -> dict[str, int]:
    """Refused calls by reason, as the cell's figures have them; reasons that did not occur are left out."""
    return {reason: num for reason, num in cell.server.figures().num_refused_calls_total.items() if num}


async def refusal(worker: FakeWorker, cell: LoopbackCell, **changes: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.register(cell.address, **changes)
    code: grpc.StatusCode = caught.value.code()
    return code


async def test_reasons_that_did_not_occur_are_told_as_zero(cell: LoopbackCell) -> None:
    await cell.start()
    assert dict(cell.server.figures().num_refused_calls_total) == {reason.value: 0 for reason in Refusal}


async def test_calls_without_the_token_are_counted(cell: LoopbackCell) -> None:
    await cell.start(cluster_token="secret")
    assert await refusal(await cell.make_worker(token="guess"), cell) is grpc.StatusCode.UNAUTHENTICATED
    stranger = await FakeGateway(cell.address, token="guess").connect(sends_signs_of_life=False)
    assert await asyncio.wait_for(stranger.ended, 20) is grpc.StatusCode.UNAUTHENTICATED
    await stranger.close()
    assert refused(cell) == {"token": 2}


async def test_replayed_register_is_refused_and_its_lane_goes_on(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=50)
    replayer = FakeWorker(instance_id=worker.instance_id, address=worker.address)
    assert await refusal(replayer, cell) is grpc.StatusCode.FAILED_PRECONDITION
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 50)
    assert worker.num_streams == 1
    assert refused(cell) == {"replayed_register": 1}


async def test_register_of_a_lane_that_is_gone_is_refused_when_it_is_replayed(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    await worker.stop()
    await until(lambda: not list(cell.server.registry.lanes))
    replayer = FakeWorker(instance_id=worker.instance_id, address=worker.address)
    assert await refusal(replayer, cell) is grpc.StatusCode.FAILED_PRECONDITION
    assert refused(cell) == {"replayed_register": 1}


async def test_made_up_epoch_does_not_keep_the_worker_out(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.make_worker()
    await refusal(worker, cell, lane_epoch=1_000_000)  # the worker itself answers with its true one
    assert refused(cell) == {"unfit_register": 1}
    await worker.join(cell.address)
    await until(lambda: cell.is_live(worker))


async def test_replayed_session_is_refused_though_its_gateway_is_gone(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await until(lambda: cell.server.hub.num_sessions == 1)
    replay = FakeGateway(cell.address, gateway.gateway_id)
    await replay.connect(session_number=1)
    assert await asyncio.wait_for(replay.ended, 20) is grpc.StatusCode.FAILED_PRECONDITION
    gateway.drop()
    await until(lambda: cell.server.hub.num_sessions == 0)
    await replay.connect(session_number=1)
    assert await asyncio.wait_for(replay.ended, 20) is grpc.StatusCode.FAILED_PRECONDITION
    assert refused(cell) == {"replayed_session": 2}
    await gateway.connect()
    await until(lambda: cell.server.hub.num_sessions == 1)
    await replay.close()


async def test_what_workers_have_refused_is_added_once(cell: LoopbackCell) -> None:
    await cell.start()
    first, second = await cell.add_worker(), await cell.add_worker()
    first.num_refused_calls = {"token": 2, "fenced_steps": 1}
    second.num_refused_calls = {"token": 1}
    await until(lambda: refused(cell) == {"token": 3, "fenced_steps": 1})
    first.num_refused_calls = {"token": 5, "fenced_steps": 1}
    await until(lambda: refused(cell) == {"token": 6, "fenced_steps": 1})
    # The same process in a new lane tells its totals again.
    first.fall_silent()
    await first.join(cell.address)
    first.num_refused_calls = {"token": 6, "fenced_steps": 1}
    await until(lambda: refused(cell) == {"token": 7, "fenced_steps": 1})


async def test_cell_in_mutual_tls_computes_and_lets_no_stranger_in(cell: LoopbackCell, tmp_path: Path) -> None:
    ours, strangers = Authority(tmp_path, "ours"), Authority(tmp_path, "strangers")
    await cell.start(cluster_token="secret", **ours.issue("scheduler").flags(ours))
    worker = await cell.add_worker(token="secret", certificates=ours.issue("worker").trusting(ours))
    # They know the token. One has no certificate, the other one of another authority, and trusts ours.
    for certificates in (None, strangers.issue("stranger").trusting(ours)):
        stranger = await cell.make_worker(token="secret", certificates=certificates)
        assert await refusal(stranger, cell) is grpc.StatusCode.UNAVAILABLE
    # Who is let in with a certificate is still asked for the token.
    certificates = ours.issue("curious").trusting(ours)
    assert await refusal(await cell.make_worker(certificates=certificates), cell) is grpc.StatusCode.UNAUTHENTICATED
    # A worker that shows a stranger's certificate when it is dialed is no worker of the cell.
    liar = await cell.make_worker(token="secret", certificates=ours.issue("liar").trusting(ours))
    elsewhere = await cell.make_worker(token="secret", certificates=strangers.issue("elsewhere").trusting(ours))
    with pytest.raises(grpc.aio.AioRpcError, match="of no authority that this service trusts"):
        await liar.register(cell.address, address=elsewhere.address)
    assert [lane.driver.identity.lane_id for lane in cell.server.registry.lanes] == [worker.instance_id]
    gateway = Credentials("secret", ours.issue("gateway").trusting(ours))
    async with gateway.dial(cell.address) as channel:
        stats = await SchedulerStub(channel).GetStats(scheduler_pb2.GetStatsRequest(), metadata=gateway.metadata)
    assert stats.num_refused_calls_total["token"] == 1
