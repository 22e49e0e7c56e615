"""Requests come in: refused, attached again, or gone on with from what was delivered."""

import pytest

from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.types import (
    BeamParams,
    Delivered,
    ErrorCode,
    FinishReason,
    Format,
    LaneId,
    SampledRows,
    SchedulerError,
    SeqId,
    StepId,
    StepResult,
    Usage,
)
from tests.scheduler.core.helpers import expected_of, make_cell, make_mixed_spec, make_request, make_spec, plan


@pytest.mark.parametrize(("num_tokens", "words"), [(0, "empty"), (256, "256"), (1000, "1000")])
def test_a_prompt_that_can_never_be_served_is_refused(num_tokens: int, words: str) -> None:
    cell = make_cell(make_spec(num_blocks=64, max_model_len=1000))
    with pytest.raises(SchedulerError, match=words) as caught:
        cell.submit(make_request("a", range(num_tokens)))
    assert caught.value.param == "prompt"


def test_a_full_queue_refuses() -> None:
    cell = make_cell(max_queued_seqs=2)
    cell.submit(make_request("a", range(4), n=2))
    with pytest.raises(SchedulerError) as caught:
        cell.submit(make_request("b", range(4)))
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED


def test_a_request_that_was_let_in_before_goes_past_a_full_queue_and_first() -> None:
    cell = make_cell(make_spec(max_num_seqs=1), max_queued_seqs=2)
    cell.submit(make_request("new", range(4), n=2))
    cell.submit(make_request("again", range(4, 8), is_resubmit=True))
    cell.plan()
    cell.apply()
    assert (len(cell.output("again")), len(cell.output("new"))) == (1, 0)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("beams", [None, BeamParams()])
def test_a_request_that_was_let_in_before_waits_for_a_worker_with_room_for_it(
    beams: BeamParams | None, is_early: bool
) -> None:
    cell = make_cell(num_lanes=0)
    request = make_request("a", range(80), n=3, beams=beams, is_resubmit=True)
    if is_early:
        cell.submit(request)
    cell.add_lane("small", make_spec(num_blocks=10, max_num_seqs=2))
    if not is_early:
        cell.submit(request)
    cell.expire()
    assert cell.plan("small") is None
    cell.add_lane("large", make_spec())
    cell.run_to_end()
    assert [len(cell.output("a", idx)) for idx in range(3)] == [8, 8, 8]


def test_requests_wait_for_the_first_worker_and_learn_its_limits() -> None:
    cell = make_cell(num_lanes=0)
    cell.submit(make_request("fits", range(10)))
    cell.submit(make_request("too-long", range(500)))
    cell.add_lane("w0", make_spec(max_model_len=100))
    error = cell.end("too-long").error
    assert error is not None
    assert error.param == "prompt"
    cell.run_to_end()
    assert len(cell.output("fits")) == 8


def test_a_known_request_replays_what_was_not_delivered() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), max_tokens=8))
    for _ in range(4):
        cell.plan()
        cell.apply()
    runs = cell.scheduler.submit(make_request("a", range(4), delivered={0: Delivered((1, 2))}))
    assert [(run.first_token_idx, list(run.token_ids)) for run in runs] == [(2, cell.output("a")[2:])]


def test_a_known_request_replays_the_end_of_a_sequence() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(4), max_tokens=20, n=2))
    cell.submit(make_request("a", range(4), max_tokens=20, n=2, stops=text[1:2]))
    while cell.clients["a", 0].end is None:  # type: ignore[index]
        cell.plan()
        cell.apply()
    delivered = {0: Delivered(text[:1]), 1: Delivered(cell.output("a", 1))}
    runs = cell.scheduler.submit(make_request("a", range(4), n=2, delivered=delivered))
    assert [(run.sequence_idx, list(run.token_ids)) for run in runs] == [(0, text[1:2]), (1, [])]
    assert (runs[0].finish_reason, runs[0].usage) == (FinishReason.STOP, cell.end("a").usage)
    assert runs[1].usage is not None, "it goes on"


def test_a_client_is_told_once_that_its_request_has_begun() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    cell.submit(make_request("first", range(8), max_tokens=2))
    cell.run_to_end()
    cell.submit(make_request("running", range(12)))
    cell.submit(make_request("waiting", range(20, 24)))
    step, runs = cell.scheduler.plan(LaneId("w0"), 0)
    assert step is not None
    assert [(run.request_id, run.token_ids, run.finish_reason) for run in runs] == [("running", (), None)]
    assert runs[0].usage == Usage(num_prompt_tokens=12, num_cached_tokens=8, num_output_tokens=0)
    assert cell.scheduler.plan(LaneId("w0"), 0)[1] == []


def test_a_client_that_attaches_again_is_told_what_has_begun() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    for name in ("running", "waiting"):
        cell.submit(make_request(name, range(4)))
    cell.plan()
    runs = [run for name in ("running", "waiting") for run in cell.scheduler.submit(make_request(name, range(4)))]
    assert [(run.request_id, run.usage is not None) for run in runs] == [("running", True)]


def test_an_unknown_request_goes_on_from_what_was_delivered() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), max_tokens=8, delivered={0: Delivered(text[:5])}))
    cell.run_to_end()
    assert cell.output("a") == text


def test_logprobs_of_a_request_that_was_submitted_again_stay_with_their_tokens() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), max_tokens=8, delivered={0: Delivered(text[:3])}))
    plan(cell)
    sampled = SampledRows([SeqId(1)], [0], text[3:4], logprobs=["logprob of the fourth"])
    cell.scheduler.apply(LaneId("w0"), StepResult(StepId(1), sampled=sampled))
    runs = cell.scheduler.submit(make_request("a", range(6), delivered={0: Delivered(text[:3])}))
    assert [(run.first_token_idx, run.token_ids, run.logprobs) for run in runs] == [(3, text[3:4], sampled.logprobs)]


def test_a_request_whose_end_was_not_delivered_ends_at_once() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), max_tokens=8, delivered={0: Delivered(text)}))
    assert cell.end("a").finish_reason is FinishReason.LENGTH


def test_a_request_delivered_to_the_models_context_ends_when_the_first_worker_tells_that() -> None:
    cell = make_cell(num_lanes=0)
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), max_tokens=8, delivered={0: Delivered(text[:4])}))
    cell.add_lane("w0", make_spec(max_model_len=10))
    assert cell.end("a").finish_reason is FinishReason.LENGTH
    assert cell.output("a") == text[:4]
    assert cell.plan() is None


def test_a_prompt_that_fits_only_in_narrower_blocks_than_its_floor_is_refused() -> None:
    cell = make_cell(make_mixed_spec(16), precision=parse_policy("native", "int4"))
    cell.submit(make_request("any", range(200), max_tokens=4))
    with pytest.raises(SchedulerError, match="blocks down to native") as caught:
        cell.submit(make_request("wide", range(200), max_tokens=4, floor=Format.NATIVE))
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "kv_precision_floor")
    cell.submit(make_request("short", range(300, 340), max_tokens=4, floor=Format.NATIVE))
    cell.run_to_end()
    cell.check_texts()
