"""Runs that wait for a slow gateway grow together."""

from protos import common_pb2
from scheduler_svc.core.types import ErrorCode, FinishReason, RequestId, SchedulerError, TokenRun, Usage
from scheduler_svc.outbox import Outbox


def run(first_token_idx: int, *token_ids: int, request_id: str = "a", index: int = 0) -> TokenRun:
    return TokenRun(RequestId(request_id), index, first_token_idx, token_ids)


def test_runs_of_a_sequence_become_one() -> None:
    outbox = Outbox()
    for token_idx in range(5):
        outbox.put(run(token_idx, 10 + token_idx), [-1.0])
    (wire,) = outbox.take().runs
    assert (wire.first_token_idx, list(wire.token_ids)) == (0, [10, 11, 12, 13, 14])
    assert len(wire.logprobs) == 5
    assert outbox.is_empty


def test_sequences_stay_apart() -> None:
    outbox = Outbox()
    outbox.put(run(0, 1), ())
    outbox.put(run(0, 2, index=1), ())
    outbox.put(run(0, 3, request_id="b"), ())
    runs = outbox.take().runs
    assert {(wire.request_id, wire.index): list(wire.token_ids) for wire in runs} == {
        ("a", 0): [1],
        ("a", 1): [2],
        ("b", 0): [3],
    }


def test_run_after_a_message_starts_where_that_one_ended() -> None:
    outbox = Outbox()
    outbox.put(run(0, 1, 2), ())
    outbox.take()
    outbox.put(run(2, 3), ())
    (wire,) = outbox.take().runs
    assert (wire.first_token_idx, list(wire.token_ids)) == (2, [3])


def test_replay_takes_the_place_of_what_it_repeats() -> None:
    outbox = Outbox()
    outbox.put(run(4, 14, 15), [-4.0, -5.0])
    outbox.put(run(2, 12, 13, 14, 15), [-2.0, -3.0, -4.0, -5.0])
    outbox.put(run(5, 15, 16), [-5.0, -6.0])
    (wire,) = outbox.take().runs
    assert (wire.first_token_idx, list(wire.token_ids)) == (2, [12, 13, 14, 15, 16])
    assert [logprobs.logprob for logprobs in wire.logprobs] == [-2, -3, -4, -5, -6]


def test_end_joins_the_tokens_before_it() -> None:
    outbox = Outbox()
    outbox.put(run(0, 1), ())
    error = SchedulerError(ErrorCode.INTERNAL, "why", "param")
    end = run(1, 2)._replace(finish_reason=FinishReason.ERROR, error=error, usage=Usage(7, 3, 2))
    outbox.put(end, ())
    (wire,) = outbox.take().runs
    assert list(wire.token_ids) == [1, 2]
    assert wire.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert (wire.error.code, wire.error.message, wire.error.param) == (common_pb2.ERROR_CODE_INTERNAL, "why", "param")
    usage = wire.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (7, 3, 2)


def test_message_is_bounded_and_the_rest_follows() -> None:
    outbox = Outbox()
    for number in range(5):
        outbox.put(run(0, *range(30_000), request_id=str(number)), ())
    sizes = []
    while not outbox.is_empty:
        sizes.append(len(outbox.take().runs))
    assert sizes == [3, 2]


async def test_wait_ends_with_a_run_or_a_nudge() -> None:
    outbox = Outbox()
    outbox.nudge()
    await outbox.wait()
    assert not outbox.take().runs
    outbox.put(run(0, 1), ())
    await outbox.wait()
    assert outbox.take().runs
