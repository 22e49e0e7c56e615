"""The worker finds its scheduler, stays known to it, and finds the next one."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from protos import scheduler_pb2 as pb
from protos.channel import CHANNEL_OPTIONS, PROTOCOL_VERSION, Refusal, Refusals, TokenInterceptor
from protos.credentials import Certificates, Credentials
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from tests.certificates import Authority
from tests.worker.fakes import make_runner
from worker_svc import registration
from worker_svc.fence import StepFence
from worker_svc.registration import Registration

TOKEN = "secret"
Item = TypeVar("Item")


class FakeScheduler(SchedulerServicer):
    """Notes who registers and who sends heartbeats; it knows who has registered, unless `forgets`."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[pb.RegisterRequest] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[pb.HeartbeatRequest] = asyncio.Queue()
        self.known_epoch = 0
        self.forgets = False
        self.refuses_next = False
        self.is_idle = asyncio.Event()  # nothing runs on the worker
        self.is_idle.set()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:  # noqa: N802
        self.registered.put_nowait(request)
        if self.refuses_next:
            self.refuses_next = False
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another model")
        self.known_epoch = request.lane_epoch
        return pb.RegisterResponse(heartbeat_interval_ms=10)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:  # noqa: N802
        self.heartbeats.put_nowait(request)
        known = not self.forgets and request.lane_epoch == self.known_epoch
        return pb.HeartbeatResponse(known=known, drained=request.draining and self.is_idle.is_set())

    def Session(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("no gateway here")

    def GetModel(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("no gateway here")

    def GetStats(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("no dashboard here")

    def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("no dashboard here")


async def start_scheduler(
    port: int = 0, certificates: Certificates | None = None
) -> tuple[FakeScheduler, grpc.aio.Server, int]:
    scheduler = FakeScheduler()
    server = grpc.aio.server(interceptors=(TokenInterceptor(TOKEN, Refusals()),), options=CHANNEL_OPTIONS)
    add_SchedulerServicer_to_server(scheduler, server)
    bound = Credentials(TOKEN, certificates).add_port(server, f"127.0.0.1:{port}")
    await server.start()
    return scheduler, server, bound


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RETRY_S", 0.02)
    monkeypatch.setattr(registration, "SILENCE_S", 0.2)


@pytest_asyncio.fixture
async def fence() -> AsyncIterator[StepFence]:
    device = ThreadPoolExecutor(1)
    yield StepFence(make_runner(), device, lambda _fault: None)
    device.shutdown()


class Running:
    """A registration loop for as long as the `with` block lasts."""

    def __init__(self, port: int, fence: StepFence, certificates: Certificates | None = None) -> None:
        self.refusals = Refusals()
        credentials = Credentials(TOKEN, certificates)
        offer = pb.RegisterRequest(protocol_version=PROTOCOL_VERSION, instance_id="worker-1", address="here:1")
        self._registration = Registration(f"127.0.0.1:{port}", credentials, offer, fence, self.refusals)

    async def __aenter__(self) -> Registration:
        self._task = asyncio.create_task(self._registration.run())
        return self._registration

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def soon(queue: "asyncio.Queue[Item]") -> Item:
    return await asyncio.wait_for(queue.get(), 30)


async def test_registers_and_sends_heartbeats(fence: StepFence) -> None:
    scheduler, server, port = await start_scheduler()
    async with Running(port, fence):
        request = await soon(scheduler.registered)
        assert (request.instance_id, request.address, request.lane_epoch) == ("worker-1", "here:1", 1)
        for _ in range(3):
            heartbeat = await soon(scheduler.heartbeats)
            assert (heartbeat.instance_id, heartbeat.lane_epoch) == ("worker-1", 1)
    assert scheduler.registered.empty()
    await server.stop(0)


async def test_registers_again_under_a_new_epoch_when_it_is_not_known(fence: StepFence) -> None:
    scheduler, server, port = await start_scheduler()
    async with Running(port, fence):
        await soon(scheduler.registered)
        scheduler.forgets = True
        assert (await soon(scheduler.registered)).lane_epoch == 2
        assert fence.lane_epoch >= 2
    await server.stop(0)


async def test_refused_registration_is_tried_again(fence: StepFence, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, server, port = await start_scheduler()
    scheduler.refuses_next = True
    async with Running(port, fence):
        assert (await soon(scheduler.registered)).lane_epoch == 1
        assert (await soon(scheduler.registered)).lane_epoch == 2
        assert (await soon(scheduler.heartbeats)).lane_epoch == 2
    assert "another model" in caplog.text
    await server.stop(0)


async def test_finds_a_scheduler_that_comes_later_and_the_one_after_it(
    fence: StepFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaints: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(registration.logger, "warning", lambda text, *_args: complaints.put_nowait(text))
    _, server, port = await start_scheduler()
    await server.stop(0)
    async with Running(port, fence):
        assert "does not answer" in await soon(complaints)
        first, server, _ = await start_scheduler(port)
        first_epoch = (await soon(first.registered)).lane_epoch
        await soon(first.heartbeats)
        await server.stop(0)
        second, server, _ = await start_scheduler(port)
        assert (await soon(second.registered)).lane_epoch > first_epoch
        await server.stop(0)


async def test_leaves_when_the_scheduler_says_that_nothing_runs_here(
    fence: StepFence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "DRAIN_POLL_S", 0.01)
    scheduler, server, port = await start_scheduler()
    async with Running(port, fence) as registered:
        await soon(scheduler.registered)
        await soon(scheduler.heartbeats)
    scheduler.is_idle.clear()
    draining = asyncio.create_task(registered.drain(60))
    while not (await soon(scheduler.heartbeats)).draining:
        pass
    assert (await soon(scheduler.heartbeats)).draining
    assert not draining.done()
    scheduler.is_idle.set()
    await asyncio.wait_for(draining, 30)
    await server.stop(0)


async def test_waits_no_longer_than_it_was_told_and_not_for_a_scheduler_that_is_gone(fence: StepFence) -> None:
    scheduler, server, port = await start_scheduler()
    scheduler.is_idle.clear()
    async with Running(port, fence) as registered:
        await soon(scheduler.registered)
    await asyncio.wait_for(registered.drain(0.05), 30)
    await server.stop(0)
    await asyncio.wait_for(registered.drain(3600), 30)


async def test_heartbeats_tell_what_was_refused_so_far(fence: StepFence) -> None:
    scheduler, server, port = await start_scheduler()
    running = Running(port, fence)
    async with running:
        assert (await soon(scheduler.heartbeats)).num_refused_calls_total["token"] == 0
        running.refusals.count(Refusal.TOKEN)
        while not (await soon(scheduler.heartbeats)).num_refused_calls_total["token"]:
            pass
    await server.stop(0)


async def test_registers_with_its_renewed_certificate_without_a_restart(
    fence: StepFence, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, strangers = Authority(tmp_path, "ours"), Authority(tmp_path, "strangers")
    pair = strangers.issue("worker")
    scheduler, server, port = await start_scheduler(certificates=ours.issue("scheduler").trusting(ours))
    async with Running(port, fence, pair.trusting(ours)):
        async with asyncio.timeout(30):
            while "it may not trust this service's certificate" not in caplog.text:  # noqa: ASYNC110 (a log has no events)
                await asyncio.sleep(0.01)
        assert scheduler.registered.empty()
        pair.become(ours.issue("renewed"))
        await soon(scheduler.registered)
        await soon(scheduler.heartbeats)
    await server.stop(0)
