"""The service over real gRPC: the fence, the order of steps, kept results, seals, the cluster token."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from protos import worker_pb2 as pb
from protos.channel import CHANNEL_OPTIONS, Refusals, token_metadata
from protos.credentials import Credentials
from protos.worker_pb2_grpc import WorkerStub
from tests.worker.fakes import (
    FakeCompute,
    continued,
    entries_of,
    entry_of,
    greedy_continuation,
    make_runner,
    new_row,
    seals,
    tokens_of,
)
from worker_svc import fence
from worker_svc.batch import StepBatch
from worker_svc.errors import DeviceFaultError, DeviceHungError, StartupError
from worker_svc.fence import StepFence
from worker_svc.service import WorkerService, start_server

INSTANCE = "worker-1"
TOKEN = "secret"
PROMPT = [5, 9, 2]
HASH = b"h" * 32


@dataclass
class GatedCompute(FakeCompute):
    """A device that can be held in the middle of a step."""

    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def forward(self, batch: StepBatch) -> Tensor:
        self.entered.set()
        assert self.gate.wait(timeout=30)
        return super().forward(batch)

    async def wait_until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


class Worker:
    """A served worker and a client of it."""

    def __init__(
        self, compute: FakeCompute, fence: StepFence, port: int, faults: list[BaseException], refusals: Refusals
    ) -> None:
        self.compute = compute
        self.fence = fence
        self.port = port
        self.faults = faults
        self.refusals = refusals
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
        self.stub = WorkerStub(self.channel)
        self.metadata = token_metadata(TOKEN)

    async def register(self) -> int:
        """Act as registration does: begin a lane epoch."""
        return await self.fence.begin_epoch()

    async def manifest(self, lane_epoch: int, instance_id: str = INSTANCE) -> list[pb.ManifestPart]:
        request = pb.ManifestRequest(instance_id=instance_id, lane_epoch=lane_epoch)
        return [part async for part in self.stub.Manifest(request, metadata=self.metadata)]

    async def adopt(self) -> int:
        lane_epoch = await self.register()
        await self.manifest(lane_epoch)
        return lane_epoch

    def steps(self) -> "grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult]":
        call: grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult] = self.stub.Steps(metadata=self.metadata)
        return call


async def read(stream: "grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult]") -> pb.StepResult:
    result = await asyncio.wait_for(stream.read(), 30)
    assert isinstance(result, pb.StepResult)
    return result


async def refusal(call: "grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult]") -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 30)
    return caught.value.code(), caught.value.details() or ""


@pytest.fixture
def compute() -> FakeCompute:
    return FakeCompute()


@pytest_asyncio.fixture
async def worker(compute: FakeCompute) -> AsyncIterator[Worker]:
    device = ThreadPoolExecutor(1)
    faults: list[BaseException] = []
    fence = StepFence(make_runner(compute), device, faults.append)
    refusals = Refusals()
    server, port = await start_server(WorkerService(INSTANCE, fence), "127.0.0.1", 0, Credentials(TOKEN), refusals)
    worker = Worker(compute, fence, port, faults, refusals)
    yield worker
    await worker.channel.close()
    await server.stop(0)
    device.shutdown()


class TestWithGate:
    @pytest.fixture
    def compute(self) -> GatedCompute:
        return GatedCompute()

    async def test_device_that_hangs_is_a_fault(
        self, worker: Worker, compute: GatedCompute, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lane_epoch = await worker.adopt()
        stream = worker.steps()
        await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, [0])]))
        await compute.wait_until_entered()
        monkeypatch.setattr(fence, "DEVICE_PATIENCE_S", 0.05)
        with pytest.raises(DeviceHungError):
            await worker.register()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.manifest(lane_epoch + 1)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert [type(fault) for fault in worker.faults] == [DeviceHungError]
        # Told once, and not waited for again.
        monkeypatch.setattr(fence, "DEVICE_PATIENCE_S", 1e9)
        with pytest.raises(DeviceHungError):
            await worker.fence.retire()
        assert len(worker.faults) == 1
        compute.gate.set()

    async def test_repeat_of_a_running_step_waits_for_it(self, worker: Worker, compute: GatedCompute) -> None:
        request = pb.StepRequest(
            lane_epoch=await worker.adopt(), step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]
        )
        broken = worker.steps()
        await broken.write(request)
        await compute.wait_until_entered()
        broken.cancel()
        again = worker.steps()
        await again.write(request)
        answer = asyncio.create_task(read(again))
        compute.gate.set()
        assert tokens_of(await answer) == {1: greedy_continuation(PROMPT, 1)[0]}
        assert compute.num_forwards == 1

    async def test_new_epoch_drops_queued_steps_and_waits_for_the_running_one(
        self, worker: Worker, compute: GatedCompute
    ) -> None:
        lane_epoch = await worker.adopt()
        old = worker.steps()
        await old.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
        await old.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=2, continued=continued(1)))
        await compute.wait_until_entered()
        # A third step is answered by a refusal only after both others were taken in.
        await old.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=9))
        adopting = asyncio.create_task(worker.adopt())
        code, details = await refusal(old)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "another lane epoch" in details
        assert not adopting.done()
        compute.gate.set()
        lane_epoch = await adopting
        assert compute.num_forwards == 1
        stream = worker.steps()
        await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, continued=continued(1)))
        assert (await read(stream)).status == pb.STEP_STATUS_FAILED  # row 1 is forgotten


async def test_two_steps_in_flight_are_answered_in_order(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    for step_id in range(2, 5):
        await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=step_id, continued=continued(1)))
    results = [await read(stream) for _ in range(4)]
    assert [result.step_id for result in results] == [1, 2, 3, 4]
    assert [tokens_of(result)[1] for result in results] == greedy_continuation(PROMPT, 4)
    assert all(result.lane_epoch == lane_epoch and result.step_ms > 0 for result in results)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


async def test_last_four_results_are_kept_and_a_repeat_runs_nothing(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    requests = [pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))])]
    requests += [
        pb.StepRequest(lane_epoch=lane_epoch, step_id=step_id, continued=continued(1)) for step_id in range(2, 7)
    ]
    first = worker.steps()
    results = []
    for request in requests:
        await first.write(request)
        results.append(await read(first))
    second = worker.steps()
    for request in requests[2:]:
        await second.write(request)
    assert [await read(second) for _ in range(4)] == results[2:]
    assert worker.compute.num_forwards == 6
    await second.write(requests[1])
    assert (await refusal(second))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_gap_is_refused_after_the_answers_before_it(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=3))
    assert (await read(stream)).step_id == 1
    code, details = await refusal(stream)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "2 is the next" in details
    again = worker.steps()
    await again.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=2))
    assert (await read(again)).step_id == 2


async def test_steps_of_another_epoch_are_refused(worker: Worker) -> None:
    before = worker.steps()
    await before.write(pb.StepRequest(lane_epoch=0, step_id=1))
    assert (await refusal(before))[0] is grpc.StatusCode.FAILED_PRECONDITION
    old_epoch = await worker.adopt()
    await worker.adopt()
    stale = worker.steps()
    await stale.write(pb.StepRequest(lane_epoch=old_epoch, step_id=1))
    code, details = await refusal(stale)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"lane epoch {old_epoch}" in details


async def test_registering_again_ends_the_old_epoch_at_once(worker: Worker) -> None:
    old_epoch = await worker.adopt()
    await worker.register()
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=old_epoch, step_id=1))
    assert (await refusal(stream))[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_manifest_is_for_the_last_registered_epoch_of_this_instance_alone(worker: Worker) -> None:
    lane_epoch = await worker.register()
    for epoch, instance_id in ((lane_epoch + 1, INSTANCE), (lane_epoch - 1, INSTANCE), (lane_epoch, "worker-2")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await worker.manifest(epoch, instance_id)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert await worker.manifest(lane_epoch) == []


async def test_seals_outlive_the_epoch_that_made_them(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    sealed = seals((entry_of(3), HASH), (entry_of(4), HASH))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, seals=sealed))
    zeroed = pb.BlockOps(zero_entries=entries_of(4))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=2, ops=zeroed))
    for _ in range(2):
        await read(stream)
    (part,) = await worker.manifest(await worker.register())
    assert part.seals == seals((entry_of(3), HASH))


async def test_health_names_instance_and_last_registered_epoch(worker: Worker) -> None:
    lane_epoch = await worker.register()
    health = await worker.stub.Health(pb.HealthRequest(), metadata=worker.metadata)
    assert (health.instance_id, health.lane_epoch) == (INSTANCE, lane_epoch)


async def test_calls_without_the_token_are_refused(worker: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Health(pb.HealthRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    worker.metadata = token_metadata("guess")
    stream = worker.steps()
    assert (await refusal(stream))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_failed_step_and_restart_cross_the_wire(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    worker.compute.fail_next = RuntimeError("no memory")
    stream = worker.steps()
    row = new_row(1, PROMPT, entries_of(0))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[row]))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=2, continued=continued(1)))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=3, restart=True, new_rows=[row]))
    statuses = [(await read(stream)).status for _ in range(3)]
    assert statuses == [pb.STEP_STATUS_FAILED, pb.STEP_STATUS_SKIPPED, pb.STEP_STATUS_OK]


async def test_fault_of_the_device_is_told_to_the_process(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    worker.compute.fail_next = torch.AcceleratorError("illegal memory access")
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    assert (await refusal(stream))[0] is grpc.StatusCode.INTERNAL
    assert isinstance(worker.faults[0], DeviceFaultError)


async def test_port_in_use_is_one_clear_line(worker: Worker) -> None:
    with pytest.raises(StartupError, match=f"127.0.0.1:{worker.port}"):
        await start_server(WorkerService(INSTANCE, worker.fence), "127.0.0.1", worker.port, Credentials(), Refusals())


def refused(worker: Worker) -> dict[str, int]:
    """Refused calls by reason; reasons that did not occur are left out."""
    return {reason: num for reason, num in worker.refusals.totals.items() if num}


async def test_stale_and_replayed_steps_are_refused_and_counted(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    row = new_row(1, PROMPT, entries_of(0))
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[row]))
    expected = [(await read(stream)).sampled.token_ids]
    for step_id in range(2, 2 + fence.NUM_KEPT_RESULTS):
        await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=step_id, continued=continued(1)))
        expected.append((await read(stream)).sampled.token_ids)
    for request in (
        pb.StepRequest(lane_epoch=lane_epoch - 1, step_id=step_id + 1, continued=continued(1)),
        pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[row]),
    ):
        replay = worker.steps()
        await replay.write(request)
        assert (await refusal(replay))[0] is grpc.StatusCode.FAILED_PRECONDITION
    # One whose result is kept is answered from that, and computed no second time.
    replay = worker.steps()
    await replay.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=step_id, continued=continued(1)))
    assert (await read(replay)).sampled.token_ids == expected[-1]
    assert refused(worker) == {"fenced_steps": 1, "step_gap": 1}
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=step_id + 1, continued=continued(1)))
    expected.append((await read(stream)).sampled.token_ids)
    assert [token_id for token_ids in expected for token_id in token_ids] == greedy_continuation(PROMPT, len(expected))


async def test_epoch_is_adopted_once(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    await read(stream)
    with pytest.raises(grpc.aio.AioRpcError, match="adopted before"):
        await worker.manifest(lane_epoch)
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=2, continued=continued(1)))
    assert (await read(stream)).status == pb.STEP_STATUS_OK
    assert refused(worker) == {"fenced_steps": 1}


async def test_epoch_that_ends_under_a_waiting_stream_counts_as_no_refusal(worker: Worker) -> None:
    lane_epoch = await worker.adopt()
    stream = worker.steps()
    await stream.write(pb.StepRequest(lane_epoch=lane_epoch, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    await read(stream)
    await worker.adopt()
    assert refused(worker) == {}


async def test_calls_without_the_token_and_for_another_process_are_counted(worker: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.manifest(await worker.register(), "another worker")
    with pytest.raises(grpc.aio.AioRpcError):
        await worker.stub.Health(pb.HealthRequest())
    assert refused(worker) == {"wrong_instance": 1, "token": 1}
