"""Who is taken in as a worker, and who is refused with which reason."""

from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2
from protos.channel import PROTOCOL_VERSION
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler_svc.core.types import Format
from scheduler_svc.registry import AllLanesFencedError

from .conftest import TIMING, LoopbackCell, until
from .fake_worker import FakeWorker, expected_output, make_model


async def refusal(worker: FakeWorker, cell: LoopbackCell, **changes: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.register(cell.address, **changes)
    return caught.value.code(), caught.value.details() or ""


async def heartbeat(cell: LoopbackCell, instance_id: str, lane_epoch: int) -> bool:
    async with grpc.aio.insecure_channel(cell.address) as channel:
        request = scheduler_pb2.HeartbeatRequest(instance_id=instance_id, lane_epoch=lane_epoch)
        return (await SchedulerStub(channel).Heartbeat(request)).known


async def test_heartbeat_is_known_in_the_epoch_that_registered_alone(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    assert await heartbeat(cell, worker.instance_id, worker.lane_epoch)
    assert not await heartbeat(cell, worker.instance_id, worker.lane_epoch + 1)
    assert not await heartbeat(cell, "nobody", 1)


async def test_other_protocol_version_is_refused_with_both(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.make_worker()
    code, details = await refusal(worker, cell, protocol_version=PROTOCOL_VERSION + 1)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert str(PROTOCOL_VERSION) in details
    assert str(PROTOCOL_VERSION + 1) in details


@pytest.mark.parametrize(
    ("field", "other", "shown"),
    [
        ("fingerprint", b"g" * 32, (b"g" * 8).hex()),
        ("block_size", 32, "32"),
        ("max_model_len", 4096, "4096"),
        ("dtype", "bfloat16", "bfloat16"),
    ],
)
async def test_other_model_than_the_first_workers_is_refused_with_both(
    cell: LoopbackCell, field: str, other: object, shown: str
) -> None:
    await cell.start()
    await cell.add_worker()
    second = await cell.make_worker(model=make_model(**{field: other}))
    code, details = await refusal(second, cell)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert field in details
    assert shown in details
    ours = getattr(make_model(), field)
    assert (ours.hex()[:16] if isinstance(ours, bytes) else str(ours)) in details


async def test_scheduler_says_once_why_a_worker_does_not_fit(
    cell: LoopbackCell, caplog: pytest.LogCaptureFixture
) -> None:
    await cell.start()
    await cell.add_worker()
    second = await cell.make_worker(model=make_model(block_size=32))
    for _ in range(2):
        _, details = await refusal(second, cell)
    warnings = [record.getMessage() for record in caplog.records if "does not fit" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].endswith(str(details))


@pytest.mark.parametrize("field", ["num_slabs", "native_blocks_per_slab", "max_num_seqs", "max_num_batched_tokens"])
async def test_worker_that_offers_nothing_is_refused(cell: LoopbackCell, field: str) -> None:
    await cell.start()
    code, details = await refusal(await cell.make_worker(), cell, **{field: 0})
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert field in details


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"num_slabs": 2**21}, "num_slabs is 2097152"), ({"blocks_per_slab": [16, 257]}, "a slab holds 257 blocks")],
)
async def test_worker_that_offers_more_than_can_be_named_is_refused(
    cell: LoopbackCell, fields: dict[str, Any], words: str
) -> None:
    await cell.start()
    code, details = await refusal(await cell.make_worker(), cell, **fields)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert words in details


async def test_worker_without_a_format_of_the_policy_is_refused(cell: LoopbackCell) -> None:
    await cell.start(kv_cache_dtype="int8")
    code, details = await refusal(await cell.make_worker(), cell, blocks_per_slab=[16, 0, 31])
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "no int8 KV blocks" in details


async def test_worker_of_another_native_dtype_than_asked_for_is_refused(cell: LoopbackCell) -> None:
    await cell.start(kv_cache_dtype="fp16")
    code, details = await refusal(await cell.make_worker(), cell)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "the cell wants float16, the worker's native KV is float32" in details


async def test_capacity_counts_narrowed_blocks(cell: LoopbackCell) -> None:
    await cell.start(kv_cache_dtype="int8")
    worker = await cell.make_worker()
    await worker.register(cell.address, blocks_per_slab=[16, 31])
    num_slabs, capacities = worker.num_slabs, cell.server.registry.kv_capacity_tokens
    assert capacities[Format.NATIVE] < num_slabs * 16 * 16 < capacities[Format.INT8] < num_slabs * 31 * 16
    assert capacities[Format.INT4] == capacities[Format.INT8], "narrower than the cell goes"


async def test_wrong_token_is_refused(cell: LoopbackCell) -> None:
    await cell.start(cluster_token="secret")
    code, _ = await refusal(await cell.make_worker(token="guess"), cell)
    assert code == grpc.StatusCode.UNAUTHENTICATED
    worker = await cell.add_worker(token="secret")
    gateway = await cell.add_gateway(token="secret")
    await gateway.submit("a", range(5, 25), max_tokens=5)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(range(5, 25), 5)
    assert cell.is_live(worker)


async def test_worker_that_does_not_know_the_token_is_refused(cell: LoopbackCell) -> None:
    await cell.start(cluster_token="secret")
    elsewhere = await cell.make_worker(token="other secret")  # the one that answers at the address
    liar = await cell.make_worker(token="secret", address=elsewhere.address)
    code, details = await refusal(liar, cell)
    assert code == grpc.StatusCode.UNAVAILABLE
    assert elsewhere.address in details


async def test_known_instance_from_another_address_is_refused(cell: LoopbackCell) -> None:
    await cell.start()
    first = await cell.add_worker()
    second = await cell.make_worker(instance_id=first.instance_id, lane_epoch=5)
    code, details = await refusal(second, cell)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert first.address in details
    assert second.address in details
    assert cell.is_live(first)


async def test_lane_epoch_must_grow(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    code, details = await refusal(worker, cell, lane_epoch=1)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "lane_epoch" in details


async def test_other_process_at_the_address_is_refused(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.make_worker()
    code, details = await refusal(worker, cell, instance_id="somebody else")
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "somebody else" in details
    assert worker.instance_id in details


async def test_address_that_nobody_answers_at_is_unavailable(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.make_worker()
    code, details = await refusal(worker, cell, address="127.0.0.1:1")
    assert code == grpc.StatusCode.UNAVAILABLE
    assert "127.0.0.1:1" in details


async def test_worker_that_registers_again_gets_a_new_lane_and_its_requests_go_on(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", range(5, 25), max_tokens=100)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    worker.fall_silent()
    await worker.join(cell.address)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(range(5, 25), 100)
    assert worker.lane_epoch == 2


async def test_get_model_tells_the_cells_model_and_limits(cell: LoopbackCell) -> None:
    await cell.start(max_num_seqs=6)
    async with grpc.aio.insecure_channel(cell.address) as channel:
        stub = SchedulerStub(channel)
        before = await stub.GetModel(scheduler_pb2.GetModelRequest())
        assert not before.HasField("model")
        await cell.add_worker(max_num_seqs=4)
        await cell.add_worker(max_num_seqs=8, num_slabs=128)
        after = await stub.GetModel(scheduler_pb2.GetModelRequest())
    assert after.model == make_model()
    assert after.max_num_seqs == 4 + 6
    assert after.kv_capacity_tokens == 128 * 16 * 16
    assert dict(after.kv_capacity_tokens_by_floor) == dict.fromkeys(map(int, Format), 128 * 16 * 16)
    assert after.max_queued_requests == cell.server.cell.settings.max_queued_requests


async def test_scheduler_whose_workers_obey_another_ends(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, fenced_ms=100))
    worker = await cell.add_worker()
    other = LoopbackCell()
    await other.start()
    # The worker turns to another scheduler for good: the first one's steps are stale from then on.
    worker.fall_silent()
    await worker.join(other.address)
    await until(lambda: other.is_live(worker))
    gateway = await cell.add_gateway()
    await gateway.submit("a", range(5, 25), max_tokens=5)
    await until(cell.server.cell.failed.done)
    assert isinstance(cell.server.cell.failed.result(), AllLanesFencedError)
    await other.stop()
    cell.may_fail = True


async def test_worker_that_comes_after_a_fence_and_dies_does_not_end_the_scheduler(cell: LoopbackCell) -> None:
    now_ms = 0
    await cell.start(clock=lambda: now_ms)
    other = LoopbackCell()
    await other.start()
    first = await cell.add_worker()
    first.fall_silent()
    await first.join(other.address)
    await until(lambda: other.is_live(first))
    gateway = await cell.add_gateway()
    await gateway.submit("a", range(5, 25), max_tokens=5)
    await until(lambda: not list(cell.server.registry.lanes))
    second = await cell.add_worker()
    await second.stop()
    await until(lambda: not list(cell.server.registry.lanes))
    now_ms += TIMING.fenced_ms + 1
    cell.server.registry.judge()
    assert not cell.server.cell.failed.done()
    await other.stop()


async def test_fence_is_forgotten_while_another_worker_stays(cell: LoopbackCell) -> None:
    now_ms = 0
    await cell.start(clock=lambda: now_ms)
    other = LoopbackCell()
    await other.start()
    worker = await cell.add_worker()
    worker.fall_silent()
    staying = await cell.add_worker(max_num_seqs=1)
    await worker.join(other.address)
    await until(lambda: other.is_live(worker))
    staying.may_step.clear()  # so that it has room for one of two requests only
    gateway = await cell.add_gateway()
    for request_id in ("a", "b"):
        await gateway.submit(request_id, range(5, 25), max_tokens=5)
    await until(lambda: len(list(cell.server.registry.lanes)) == 1)
    staying.may_step.set()
    now_ms += TIMING.fenced_ms + 1
    cell.server.registry.restart_timers()
    cell.server.registry.judge()
    assert cell.is_live(staying)
    await staying.stop()
    await until(lambda: not list(cell.server.registry.lanes))
    cell.server.registry.judge()
    assert not cell.server.cell.failed.done()
    await other.stop()


async def test_worker_that_leaves_ends_its_sequences_first(cell: LoopbackCell) -> None:
    await cell.start()
    leaving = await cell.add_worker()
    leaving.may_step.clear()
    gateway = await cell.add_gateway()
    await gateway.submit("a", range(5, 25), max_tokens=5)
    await until(lambda: cell.server.cell.core.num_running_seqs == 1)
    assert not await leaving.drain(cell.address)
    staying = await cell.add_worker()
    await gateway.submit("b", range(35, 55), max_tokens=5)
    await until(lambda: gateway.output("b").has_ended)
    assert not gateway.output("a").has_ended
    leaving.may_step.set()
    await until(lambda: gateway.output("a").has_ended)
    while not await leaving.drain(cell.address):
        pass
    assert [lane.driver.identity.lane_id for lane in cell.server.registry.lanes] == [staying.instance_id]
    assert cell.server.cell.core.counters.worker_losses == 0
    assert gateway.output("a").token_ids == expected_output(range(5, 25), 5)
