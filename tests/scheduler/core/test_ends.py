"""Ends that do not come from a sequence's own rules: aborts, deadlines, no lane that is large enough."""

from scheduler_svc.core.ends import MAX_HOMELESS_MS
from scheduler_svc.core.types import ErrorCode, FinishReason
from tests.scheduler.core.helpers import make_cell, make_request, make_spec, plan


def test_abort_is_idempotent_in_every_state() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    for name in ("running", "waiting"):
        cell.submit(make_request(name, range(4), n=2))
    plan(cell)
    for name in ("running", "waiting", "unknown", "running", "waiting"):
        cell.abort(name)
    assert {client.end.finish_reason for client in cell.clients.values() if client.end} == {FinishReason.ABORT}
    cell.run_to_end()


def test_a_deadline_ends_a_request() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), deadline_ms=50))
    cell.expire(49)
    plan(cell)
    cell.expire(1)
    error = cell.end("a").error
    assert error is not None
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    cell.run_to_end()


def test_a_sequence_too_long_for_the_lane_that_is_left_blocks_nobody_and_ends_in_time() -> None:
    cell = make_cell(num_lanes=0)
    cell.add_lane("large", make_spec(num_blocks=30))
    cell.submit(make_request("long", range(80), max_tokens=4))
    plan(cell, "large")
    cell.drop_lane("large")
    cell.add_lane("small", make_spec(num_blocks=10))
    cell.submit(make_request("short", range(100, 108), max_tokens=4))
    cell.expire()
    cell.now_ms += MAX_HOMELESS_MS - 1
    while not cell.clients["short", 0].end:  # type: ignore[index]
        cell.plan("small")
        cell.apply("small")
    cell.expire()
    assert cell.clients["long", 0].end is None  # type: ignore[index]
    cell.expire(1)
    assert cell.end("long").finish_reason is FinishReason.ERROR


def test_all_samples_of_a_prompt_too_long_for_every_lane_end_together() -> None:
    cell = make_cell(num_lanes=0)
    cell.add_lane("large", make_spec(num_blocks=30))
    cell.submit(make_request("long", range(80), n=3, max_tokens=4))
    cell.drop_lane("large")
    cell.add_lane("small", make_spec(num_blocks=10))
    cell.expire()
    cell.expire(MAX_HOMELESS_MS)
    ends = [cell.end("long", idx) for idx in range(3)]
    assert [(end.error.code, end.error.param) for end in ends if end.error] == [
        (ErrorCode.INVALID_ARGUMENT, "prompt")
    ] * 3
