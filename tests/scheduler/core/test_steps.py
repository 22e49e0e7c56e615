"""What a step carries: chunks, decodes, what is left out, places given up; static batches."""

import pytest

from scheduler_svc.core import planner
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.types import FinishReason, LaneId, SampledRows, SeqId, StepId, StepResult
from tests.scheduler.core.helpers import entries, expected_of, make_cell, make_request, make_spec, plan


def test_a_prompt_is_planned_in_chunks_and_only_the_last_one_samples() -> None:
    cell = make_cell(make_spec(budget=8))
    cell.submit(make_request("a", range(18), max_tokens=2))
    first, second = plan(cell), plan(cell)
    assert cell.plan() is None  # two steps are in flight
    assert [(r.num_computed_tokens, r.num_scheduled_tokens) for r in first.new_rows] == [(0, 8)]
    assert first.new_rows[0].entries == entries(0, 1)
    assert [(r.num_scheduled_tokens, r.new_entries) for r in second.continued_rows] == [(8, entries(2, 3))]
    cell.apply()
    cell.apply()
    assert cell.output("a") == []
    third = plan(cell)
    assert third.continued_rows[0].num_scheduled_tokens == 2
    assert third.ops.zero == entries(4)  # the one block that the step does not fill
    cell.run_to_end()
    cell.check_texts()


def test_decodes_come_before_prefill_in_the_budget() -> None:
    cell = make_cell(make_spec(budget=8))
    cell.submit(make_request("a", range(4)))
    plan(cell)
    cell.submit(make_request("b", range(20, 40)))
    second = plan(cell)
    assert [row.num_scheduled_tokens for row in second.continued_rows] == [1]
    assert [row.num_scheduled_tokens for row in second.new_rows] == [7]


def test_a_row_known_to_end_by_length_is_left_out() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), max_tokens=1))
    plan(cell)
    assert cell.plan() is None
    cell.apply()
    assert cell.end("a").finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_row_whose_next_step_is_in_flight() -> None:
    cell = make_cell()
    request = make_request("a", range(4), max_tokens=20)
    stop = expected_of(request)[2]
    cell.submit(make_request("a", range(4), max_tokens=20, stops=[stop]))
    cell.run_to_end()
    assert cell.end("a").finish_reason is FinishReason.STOP
    assert cell.output("a")[-1] == stop
    cell.check_texts()


def test_min_tokens_outlasts_a_stop_token() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(4), max_tokens=9))
    cell.submit(make_request("a", range(4), max_tokens=9, stops=[text[0]], min_tokens=9))
    cell.run_to_end()
    assert cell.output("a") == text


def test_of_several_tokens_those_after_the_end_are_dropped() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), max_tokens=9, stops=[8]))
    cell.submit(make_request("b", range(20, 24), max_tokens=3))
    plan(cell)
    sampled = SampledRows([SeqId(1), SeqId(2)], [0, 0], [7, 8, 9, 9, 9, 9, 9], [3, 4])
    cell.take(cell.scheduler.apply(LaneId("w0"), StepResult(StepId(1), sampled=sampled)))
    assert (cell.output("a"), cell.end("a").finish_reason) == ([7, 8], FinishReason.STOP)
    assert (cell.output("b"), cell.end("b").finish_reason) == ([9, 9, 9], FinishReason.LENGTH)
    assert cell.scheduler.counters.output_tokens == 5


def test_places_given_up_wait_for_the_steps_in_flight() -> None:
    cell = make_cell(make_spec(num_blocks=4))
    cell.submit(make_request("a", range(4)))
    plan(cell)
    plan(cell)
    cell.abort("a")
    assert cell.scheduler.lane_stats(LaneId("w0")).num_quarantined_blocks == 2
    cell.apply()
    cell.apply()
    stats = cell.scheduler.lane_stats(LaneId("w0"))
    assert (stats.num_free_blocks, stats.num_quarantined_blocks) == (4, 0)
    assert plan(cell).finished_seq_ids  # a step without rows tells the worker


def test_step_tells_a_worker_so_many_tokens_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_TOLD_TOKENS", 40)
    cell = make_cell(make_spec(256, max_num_seqs=32, budget=1000))
    cell.submit(make_request("first", range(20), max_tokens=1))
    cell.run_to_end()
    for number in range(4):
        cell.submit(make_request(f"r{number}", [*range(20), 100 + number], n=3, max_tokens=9))
    most = 0
    while cell.scheduler.request_ids():
        step = cell.plan()
        if step is not None:
            most = max(most, sum(len(row.token_ids) for row in step.new_rows))
        cell.apply()
    # Those that join, and those that are forked off their prompts a step later: each kind goes on until past the bound.
    assert 21 < most <= 2 * (40 + 22)
    cell.check_texts()


def test_static_batch_takes_what_comes_while_its_prompts_are_computed() -> None:
    cell = make_cell(policy=SchedulingPolicy.STATIC)
    cell.submit(make_request("first", range(10), max_tokens=9))
    assert cell.plan()
    assert not cell.plan()
    cell.submit(make_request("later", range(30, 40), max_tokens=2))
    while not cell.clients["first", 0].end:  # type: ignore[index]
        cell.plan()
        cell.apply()
    assert cell.clients["later", 0].end  # type: ignore[index]
    cell.check_texts()


def test_static_batch_is_not_kept_open_by_one_short_request_after_the_other() -> None:
    cell = make_cell(make_spec(max_num_seqs=4), policy=SchedulingPolicy.STATIC)
    cell.submit(make_request("long", range(10), max_tokens=9))
    for number in range(40):
        cell.submit(make_request(f"short {number}", [number] * 10, max_tokens=1))
        cell.plan()
        if number:
            cell.apply()
    assert cell.clients["long", 0].end  # type: ignore[index]
    cell.run_to_end()
    cell.check_texts()


def test_full_static_batch_takes_nobody_in_while_a_prompt_is_half_computed() -> None:
    cell = make_cell(make_spec(max_num_seqs=3, budget=10), policy=SchedulingPolicy.STATIC)
    cell.submit(make_request("long", range(27), max_tokens=9))
    for number in range(8):
        cell.submit(make_request(f"short {number}", [number] * 27, max_tokens=1))
    cell.plan()
    while not cell.clients["long", 0].end:  # type: ignore[index]
        cell.plan()
        cell.apply()
    assert [number for number in range(8) if cell.output(f"short {number}")] == [0, 1]
    cell.run_to_end()
    cell.check_texts()


def test_static_batches_run_until_their_last_row_has_ended() -> None:
    cell = make_cell(make_spec(max_num_seqs=2, budget=100), policy=SchedulingPolicy.STATIC)
    for name, max_tokens in (("short", 2), ("long", 9), ("next", 2)):
        cell.submit(make_request(name, [max_tokens, len(name), 3], max_tokens=max_tokens))
    while not cell.clients["long", 0].end:  # type: ignore[index]
        cell.plan()
        cell.apply()
        assert not cell.output("next")
    cell.run_to_end()
    cell.check_texts()
