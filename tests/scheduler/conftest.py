"""A cell on loopback: the real scheduler with its real core, fake workers and fake gateways."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from scheduler_svc.server import SchedulerServer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timing import Clock, IndexTiming, Timing, monotonic_ms

from .fake_gateway import FakeGateway
from .fake_worker import FakeWorker

# Short where a test waits for it to pass, long enough where it must not pass on a busy machine.
TIMING = Timing(tick_ms=10, sign_of_life_ms=50, detached_ms=300, redial_ms=1000)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return as soon as the condition holds; fails when it does not in time."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition did not come true in time")


class LoopbackCell:
    """Starts the parts and checks at the end that nobody broke the protocol."""

    def __init__(self) -> None:
        self.server: SchedulerServer
        self.address = ""
        self.workers: list[FakeWorker] = []
        self.gateways: list[FakeGateway] = []
        self.may_fail = False

    async def start(
        self,
        timing: Timing = TIMING,
        clock: Clock = monotonic_ms,
        index_timing: IndexTiming | None = None,
        **settings: Any,
    ) -> "LoopbackCell":
        self.server = SchedulerServer(SchedulerSettings(scheduler_port=0, **settings), timing, clock, index_timing)
        self.address = await self.server.start()
        return self

    async def add_worker(self, **fields: Any) -> FakeWorker:
        """Add a worker and wait for its lane."""
        worker = await self.make_worker(**fields)
        await worker.join(self.address)
        await until(lambda: self.is_live(worker))
        return worker

    async def make_worker(self, **fields: Any) -> FakeWorker:
        """Start a worker that has not registered."""
        fields = {"instance_id": f"worker-{len(self.workers) + 1}"} | fields
        worker = await FakeWorker(**fields).start()
        self.workers.append(worker)
        return worker

    async def add_gateway(self, gateway_id: str = "gateway-1", **fields: Any) -> FakeGateway:
        gateway = FakeGateway(self.address, gateway_id, **fields)
        self.gateways.append(gateway)
        return await gateway.connect()

    def is_live(self, worker: FakeWorker) -> bool:
        return any(
            lane.driver.is_live and lane.driver.identity.lane_id == worker.instance_id
            for lane in self.server.registry.lanes
        )

    @property
    def num_seqs(self) -> int:
        core = self.server.cell.core
        return core.num_running_seqs + core.num_waiting_seqs

    async def stop(self) -> None:
        await asyncio.gather(*(gateway.close() for gateway in self.gateways))
        await self.server.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def check(self) -> None:
        self.server.cell.core.check_integrity()
        failed = self.server.cell.failed
        assert self.may_fail or not failed.done(), failed.result()
        assert [worker.mistakes for worker in self.workers if worker.mistakes] == []
        assert [gateway.mistakes for gateway in self.gateways if gateway.mistakes] == []


@pytest.fixture
async def cell() -> AsyncIterator[LoopbackCell]:
    cell = LoopbackCell()
    yield cell
    await cell.stop()
    cell.check()
