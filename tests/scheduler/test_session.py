"""A gateway's session: superseding, breaks and re-attachment, aborts in every state, refusals."""

from dataclasses import replace

import grpc
import grpc.aio
import pytest

from protos import common_pb2, scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerStub

from .conftest import TIMING, LoopbackCell, until
from .fake_gateway import FakeGateway
from .fake_worker import expected_output

ABORT = common_pb2.FINISH_REASON_ABORT
PROMPT = list(range(10, 30))


async def started(gateway: FakeGateway, request_id: str, num_tokens: int = 3) -> None:
    await until(lambda: len(gateway.output(request_id).token_ids) >= num_tokens)


async def test_broken_session_goes_on_in_a_new_one_without_a_token_lost_or_twice(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    for request_id in ("a", "b"):
        await gateway.submit(request_id, PROMPT, max_tokens=300)
    for num_tokens in (5, 50, 100):
        await started(gateway, "a", num_tokens)
        gateway.drop()
        await gateway.connect(["a", "b"])
        for request_id in ("a", "b"):
            await gateway.submit(request_id, PROMPT, max_tokens=300)
    await until(lambda: gateway.output("a").has_ended and gateway.output("b").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 300)
    assert gateway.output("b").token_ids == expected_output(PROMPT, 300)
    assert gateway.num_gaps == 0


async def test_request_that_ends_during_a_break_is_still_delivered_whole(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, detached_ms=60_000))
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=30)
    await started(gateway, "a")
    worker.may_step.clear()
    gateway.drop()
    await until(lambda: cell.server.hub.num_sessions == 0)
    worker.may_step.set()
    await until(lambda: cell.num_seqs == 0)
    await gateway.connect(["a"])
    await gateway.submit("a", PROMPT, max_tokens=30)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 30)


async def test_sample_that_ends_during_a_break_while_another_goes_on_gets_its_end(cell: LoopbackCell) -> None:
    first = expected_output(PROMPT, 40, 0)
    stop = next(token_id for token_id in first[10:] if token_id not in expected_output(PROMPT, 400, 1))
    await cell.start(replace(TIMING, detached_ms=60_000))
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    fields = {"max_tokens": 400, "n": 2, "sampling": {"stop_token_ids": [stop]}}
    await gateway.submit("a", PROMPT, **fields)  # type: ignore[arg-type]
    await started(gateway, "a", 2)
    worker.may_step.clear()
    gateway.drop()
    await until(lambda: cell.server.hub.num_sessions == 0)
    worker.may_step.set()
    await until(lambda: cell.num_seqs == 1)
    worker.may_step.clear()
    await gateway.connect(["a"])
    await gateway.submit("a", PROMPT, **fields)  # type: ignore[arg-type]
    await until(lambda: gateway.output("a", 0).has_ended)
    worker.may_step.set()
    await until(lambda: gateway.output("a", 1).has_ended)
    assert gateway.output("a", 0).token_ids == first[: first.index(stop) + 1]
    assert gateway.output("a", 0).terminal_runs[0].usage.num_output_tokens == first.index(stop) + 1
    assert gateway.output("a", 1).token_ids == expected_output(PROMPT, 400, 1)


async def test_sample_that_the_gateway_ended_during_a_break_is_not_computed_on(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, detached_ms=60_000))
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=1500, n=2)
    await started(gateway, "a")
    worker.may_step.clear()
    gateway.drop()
    await until(lambda: cell.server.hub.num_sessions == 0)
    end = scheduler_pb2.TokenRun(request_id="a", finish_reason=common_pb2.FINISH_REASON_STOP)
    gateway.output("a", 0).terminal_runs.append(end)
    await gateway.connect(["a"])
    await gateway.submit("a", PROMPT, max_tokens=1500, n=2)
    await until(lambda: cell.num_seqs == 1)
    await gateway.abort("a", 1)
    await until(lambda: gateway.output("a", 1).has_ended)
    worker.may_step.set()


async def test_resubmit_in_the_same_session_replays(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=200)
    await started(gateway, "a", 20)
    del gateway.output("a").token_ids[5:]  # as after a gap
    await gateway.submit("a", PROMPT, max_tokens=200)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 200)


async def test_broken_sessions_requests_are_aborted_after_a_while(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, detached_ms=50))
    worker = await cell.add_worker()
    worker.may_step.clear()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=300)
    await until(lambda: cell.num_seqs == 1)
    gateway.drop()
    await until(lambda: cell.num_seqs == 0)
    worker.may_step.set()


async def test_newer_session_supersedes_and_aborts_what_it_does_not_list(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("kept", PROMPT, max_tokens=300)
    await gateway.submit("given up", PROMPT, max_tokens=2000)
    await started(gateway, "given up")
    ended = gateway.ended
    await gateway.connect(["kept"])  # while the old stream is still there
    await gateway.submit("kept", PROMPT, max_tokens=300)
    assert await ended == grpc.StatusCode.ABORTED
    await until(lambda: gateway.output("kept").has_ended and cell.num_seqs == 0)
    assert gateway.output("kept").token_ids == expected_output(PROMPT, 300)
    assert not gateway.output("given up").has_ended


async def test_listed_request_that_is_not_submitted_again_is_aborted(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, detached_ms=50))
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=300)
    await started(gateway, "a")
    worker.may_step.clear()
    await gateway.connect(["a"])
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").finish_reason == ABORT
    worker.may_step.set()


async def test_each_submit_gives_a_gateways_other_requests_more_time(cell: LoopbackCell) -> None:
    now_ms = 0
    await cell.start(replace(TIMING, detached_ms=300), clock=lambda: now_ms)
    hub = cell.server.hub
    endings: list[Exception] = []
    session = hub.open(scheduler_pb2.Hello(gateway_id="g", session_number=1), endings.append)
    submits = [scheduler_pb2.Submit(request_id=request_id, token_ids=PROMPT, n=1) for request_id in ("a", "b")]
    for submit in submits:
        hub.receive(session, scheduler_pb2.ClientMessage(submit=submit))
    session = hub.open(scheduler_pb2.Hello(gateway_id="g", session_number=2, request_ids=["a", "b"]), endings.append)
    now_ms += 250
    hub.receive(session, scheduler_pb2.ClientMessage(submit=submits[0]))
    now_ms += 250
    hub.judge()
    assert hub.num_held_seqs == 2
    now_ms += 100
    hub.judge()
    assert hub.num_held_seqs == 1


async def test_late_message_of_a_superseded_session_is_ignored(cell: LoopbackCell) -> None:
    await cell.start()
    hub = cell.server.hub
    endings: list[Exception] = []
    older = hub.open(scheduler_pb2.Hello(gateway_id="g", session_number=1), endings.append)
    hub.open(scheduler_pb2.Hello(gateway_id="g", session_number=2), endings.append)
    submit = scheduler_pb2.Submit(request_id="a", token_ids=PROMPT, n=1)
    hub.receive(older, scheduler_pb2.ClientMessage(submit=submit))
    assert hub.num_held_seqs == 0
    assert len(endings) == 1


async def test_older_session_is_refused(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await until(lambda: cell.server.hub.num_sessions == 1)
    older = FakeGateway(cell.address)
    await older.connect(session_number=gateway.session_number)
    assert await older.ended == grpc.StatusCode.FAILED_PRECONDITION
    assert not gateway.ended.done()
    await older.close()


async def test_silent_gateway_is_a_break(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, silence_ms=200))
    gateway = FakeGateway(cell.address)
    await gateway.connect(sends_signs_of_life=False)
    assert await gateway.ended == grpc.StatusCode.ABORTED
    await gateway.close()


async def test_scheduler_gives_signs_of_life(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await until(lambda: gateway.num_empty_messages >= 3)


async def test_second_hello_is_refused(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await gateway.say_hello_again()
    assert await gateway.ended == grpc.StatusCode.FAILED_PRECONDITION


async def test_session_without_hello_is_refused(cell: LoopbackCell) -> None:
    await cell.start()
    async with grpc.aio.insecure_channel(cell.address) as channel:
        stream = SchedulerStub(channel).Session()
        await stream.write(scheduler_pb2.ClientMessage())
        assert await stream.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_session_that_says_nothing_is_refused(cell: LoopbackCell) -> None:
    await cell.start(replace(TIMING, silence_ms=100))
    async with grpc.aio.insecure_channel(cell.address) as channel:
        assert await SchedulerStub(channel).Session().code() == grpc.StatusCode.ABORTED


async def test_abort_while_waiting_for_a_model(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=5, n=2)
    await gateway.abort("a", 1)
    await until(lambda: gateway.output("a", 1).has_ended)
    assert not gateway.output("a", 0).has_ended
    await gateway.abort("a")
    await until(lambda: gateway.output("a", 0).has_ended)
    assert gateway.output("a").finish_reason == ABORT
    assert cell.server.hub.is_idle


async def test_abort_while_waiting_in_the_queue(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker(max_num_seqs=1)
    gateway = await cell.add_gateway()
    await gateway.submit("running", PROMPT, max_tokens=100)
    await gateway.submit("waiting", PROMPT, max_tokens=100)
    await until(lambda: cell.num_seqs == 2)
    await gateway.abort("waiting")
    await until(lambda: gateway.output("waiting").has_ended)
    assert gateway.output("waiting").finish_reason == ABORT
    await until(lambda: gateway.output("running").has_ended)
    assert gateway.output("running").token_ids == expected_output(PROMPT, 100)
    assert max(worker.step_sizes) == 1


async def test_abort_with_steps_in_flight(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=1000, n=2)
    await started(gateway, "a")
    worker.may_step.clear()
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 2)
    await gateway.abort("a", 1)
    await until(lambda: gateway.output("a", 1).has_ended)
    await gateway.abort("a")
    await gateway.abort("a")
    await until(lambda: gateway.output("a").has_ended)
    worker.may_step.set()
    await until(lambda: cell.server.figures().lanes[0].num_steps_in_flight == 0)
    figures = cell.server.figures().lanes[0]
    assert figures.num_quarantined_blocks == 0
    assert figures.num_free_blocks + figures.num_cached_blocks == figures.num_blocks


async def test_another_gateways_request_cannot_be_touched(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    owner = await cell.add_gateway("owner")
    other = await cell.add_gateway("other")
    await owner.submit("a", PROMPT, max_tokens=300)
    await started(owner, "a")
    await other.submit("a", PROMPT, max_tokens=300)
    await other.abort("a")
    await until(lambda: other.output("a").has_ended and owner.output("a").has_ended)
    assert other.output("a").error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert owner.output("a").token_ids == expected_output(PROMPT, 300)


async def test_prompt_that_can_never_be_served_ends_every_index_with_the_reason(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", [5] * 3000, max_tokens=5, n=2)
    await until(lambda: gateway.output("a", 0).has_ended and gateway.output("a", 1).has_ended)
    for index in range(2):
        error = gateway.output("a", index).error
        assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert error.param == "prompt"
        assert "3000" in error.message
        assert "2048" in error.message


async def test_full_queue_refuses(cell: LoopbackCell) -> None:
    await cell.start(max_queued_requests=2)
    worker = await cell.add_worker(max_num_seqs=1)
    worker.may_step.clear()
    gateway = await cell.add_gateway()
    await gateway.submit("0", PROMPT, max_tokens=20)
    await until(lambda: cell.server.figures().num_running_seqs == 1)
    for request_id in ("1", "2", "3"):
        await gateway.submit(request_id, PROMPT, max_tokens=20)
    await until(lambda: gateway.output("3").has_ended)
    assert gateway.output("3").error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    worker.may_step.set()
    await until(lambda: all(gateway.output(request_id).has_ended for request_id in ("0", "1", "2")))
    for request_id in ("0", "1", "2"):
        assert gateway.output(request_id).token_ids == expected_output(PROMPT, 20)


async def test_full_queue_refuses_before_the_first_worker_too(cell: LoopbackCell) -> None:
    await cell.start(max_queued_requests=2)
    gateway = await cell.add_gateway()
    for request_id in ("1", "2", "3"):
        await gateway.submit(request_id, PROMPT, max_tokens=20)
    await until(lambda: gateway.output("3").has_ended)
    assert gateway.output("3").error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert cell.server.figures().num_waiting_seqs == 2


@pytest.mark.parametrize("has_worker", [False, True])
async def test_tenant_that_fills_the_queue_takes_no_place_from_another(cell: LoopbackCell, has_worker: bool) -> None:
    await cell.start(max_queued_requests=2)
    gateway = await cell.add_gateway()
    if has_worker:
        worker = await cell.add_worker(max_num_seqs=1)
        worker.may_step.clear()
        await gateway.submit("running", PROMPT, max_tokens=20)
        await until(lambda: cell.server.figures().num_running_seqs == 1)
    for request_id in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await gateway.submit(request_id, PROMPT, max_tokens=20, tenant=request_id[0])
    await until(lambda: gateway.output("c1").has_ended)
    refused = {request_id for request_id in ("a1", "a2", "a3", "b1", "b2") if gateway.output(request_id).has_ended}
    assert refused == {"a3"}
    for request_id in ("a3", "c1"):
        assert gateway.output(request_id).error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    assert cell.server.figures().num_waiting_seqs == 4


async def test_request_that_was_let_in_before_goes_past_the_bound_of_a_restarted_scheduler(
    cell: LoopbackCell,
) -> None:
    await cell.start(max_queued_requests=2)
    gateway = await cell.add_gateway()
    for request_id in ("1", "2", "3"):
        await gateway.submit(request_id, PROMPT, max_tokens=20, is_resubmit=True)
    await until(lambda: cell.server.figures().num_waiting_seqs == 3)
    await gateway.submit("new", PROMPT, max_tokens=20)
    await until(lambda: gateway.output("new").has_ended)
    assert gateway.output("new").error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    await cell.add_worker()
    await until(lambda: all(gateway.output(request_id).has_ended for request_id in ("1", "2", "3")))
    assert gateway.output("3").token_ids == expected_output(PROMPT, 20)


async def test_more_samples_than_may_ever_wait_are_a_mistake_of_the_request(cell: LoopbackCell) -> None:
    await cell.start(max_queued_requests=2)
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=20, n=3)
    await until(lambda: all(gateway.output("a", index).has_ended for index in range(3)))
    for index in range(3):
        error = gateway.output("a", index).error
        assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, "n")
        assert "3" in error.message
        assert "2" in error.message


async def test_deadline_of_a_request_passes(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    worker.may_step.clear()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=20, remaining_deadline_ms=100)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    worker.may_step.set()
