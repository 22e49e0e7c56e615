"""What a cell does, seen through step plans and clients' output."""

import pytest

from scheduler_svc.core.policy import MAX_TIMES_PASSED, SchedulingPolicy
from scheduler_svc.core.scheduler import MAX_HOMELESS_MS
from scheduler_svc.core.types import (
    Delivered,
    Entry,
    ErrorCode,
    FinishReason,
    LaneId,
    SampledRow,
    SchedulerError,
    SeqId,
    StepId,
    StepPlan,
    StepResult,
)
from tests.scheduler.core.helpers import Cell, expected_of, make_cell, make_request, make_spec


def plan(cell: Cell, name: str = "w0") -> StepPlan:
    made = cell.plan(name)
    assert made is not None
    return made


def entries(*block_ids: int) -> list[Entry]:
    return [Entry(block_id * 8) for block_id in block_ids]


# ---- steps


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


# ---- prefix cache


def test_a_second_prompt_starts_behind_the_cached_prefix() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", [*range(8), 40, 41], max_tokens=1))
    row = plan(cell).new_rows[0]
    assert (row.num_computed_tokens, row.entries) == (8, entries(0, 1, 3))
    cell.run_to_end()
    usage = cell.end("b").usage
    assert usage is not None
    assert usage.num_cached_tokens == 8
    assert cell.scheduler.counters.prefix_cache_queries == 20
    assert cell.scheduler.counters.prefix_cache_hits == 8


def test_a_fully_cached_prompt_computes_its_last_block_anew() -> None:
    cell = make_cell()
    for name in "ab":
        cell.submit(make_request(name, range(8), max_tokens=3))
        cell.run_to_end()
    usage = cell.end("b").usage
    assert usage is not None
    assert usage.num_cached_tokens == 4
    cell.check_texts()


def test_generated_tokens_are_cached_too() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), max_tokens=9))
    cell.run_to_end()
    cell.submit(make_request("b", [*range(4), *cell.output("a"), 1, 2], max_tokens=1))
    assert plan(cell).new_rows[0].num_computed_tokens == 12


def test_nothing_is_published_before_its_step_was_applied() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(9), max_tokens=4))
    assert plan(cell).seals == []
    assert plan(cell).seals == []
    cell.apply()
    assert [seal.entry for seal in plan(cell).seals] == entries(0, 1)


def test_other_salts_share_nothing() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", range(10), max_tokens=1, salt="other"))
    assert plan(cell).new_rows[0].num_computed_tokens == 0


def test_a_request_may_refuse_the_cache() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", range(10), max_tokens=1, skip_cache_read=True))
    assert plan(cell).new_rows[0].num_computed_tokens == 0


def test_a_prefix_being_computed_is_waited_for() -> None:
    cell = make_cell(make_spec(budget=100))
    cell.submit(make_request("a", range(20), max_tokens=4))
    cell.submit(make_request("b", [*range(16), 40], max_tokens=4))
    assert len(plan(cell).new_rows) == 1
    cell.apply()
    assert plan(cell).new_rows[0].num_computed_tokens == 16
    cell.run_to_end()
    cell.check_texts()


def test_restored_blocks_are_hits() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(12), max_tokens=2))
    cell.plan()
    cell.apply()
    seals = plan(cell).seals
    restarted = make_cell(num_lanes=0)
    restarted.add_lane("w0", make_spec())
    restarted.workers[LaneId("w0")].slots = dict(cell.workers[LaneId("w0")].slots)
    restarted.scheduler.restore(LaneId("w0"), seals)
    restarted.submit(make_request("b", range(12), max_tokens=5))
    assert plan(restarted).new_rows[0].num_computed_tokens == 8
    restarted.run_to_end()
    restarted.check_texts()


# ---- forks


def test_samples_share_the_prompt_and_copy_its_tail() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), n=3, max_tokens=6))
    assert len(plan(cell).new_rows) == 1
    second = plan(cell)
    assert [row.entries for row in second.new_rows] == [entries(0, 1, 4), entries(0, 1, 5)]
    assert [row.num_computed_tokens for row in second.new_rows] == [9, 9]
    # The parent writes to the shared tail as well, so it gets a copy too.
    assert [(patch.block_idx, patch.entry) for patch in second.patches] == [(2, Entry(3 * 8))]
    assert sorted(second.ops.copy) == [(Entry(16), Entry(24)), (Entry(16), Entry(32)), (Entry(16), Entry(40))]
    cell.run_to_end()
    cell.check_texts()


def test_samples_do_not_share_a_block_of_which_they_use_nothing() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(9), n=2, max_tokens=6))
    plan(cell)
    second = plan(cell)
    assert second.new_rows[0].entries == entries(0, 1, 3)
    assert second.ops.copy == []
    cell.run_to_end()
    cell.check_texts()


def test_samples_beyond_the_rows_queue() -> None:
    cell = make_cell(make_spec(max_num_seqs=2))
    cell.submit(make_request("a", range(10), n=5, max_tokens=6))
    cell.run_to_end()
    cell.check_texts()


def test_the_leader_may_be_aborted_before_the_others_forked() -> None:
    cell = make_cell(make_spec(budget=4))
    cell.submit(make_request("a", range(10), n=3, max_tokens=6))
    plan(cell)
    cell.abort("a", 0)
    cell.run_to_end()
    cell.check_texts()
    assert cell.end("a", 1).finish_reason is FinishReason.LENGTH


# ---- pressure


def test_the_newest_row_is_preempted_and_replays_its_tokens() -> None:
    cell = make_cell(make_spec(num_blocks=6))
    cell.submit(make_request("a", range(8), max_tokens=12))
    cell.submit(make_request("b", range(20, 28), max_tokens=12))
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions >= 1
    assert cell.end("a").finish_reason is FinishReason.LENGTH
    cell.check_texts()


def test_priority_decides_who_is_preempted_and_who_goes_first() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    cell.submit(make_request("late", range(4), priority=1))
    cell.submit(make_request("soon", range(4, 8), priority=0))
    assert plan(cell).new_rows[0].token_ids == (4, 5, 6, 7)


def test_a_victim_in_the_plan_returns_its_budget_and_its_operations() -> None:
    cell = make_cell(make_spec(num_blocks=4, budget=8))
    cell.submit(make_request("a", range(4), max_tokens=12))
    cell.submit(make_request("b", range(20, 24), max_tokens=12))
    for _ in range(9):
        cell.plan()
        cell.apply()
    cell.run_to_end()
    cell.check_texts()


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_an_error() -> None:
    cell = make_cell(make_spec(num_blocks=3))
    cell.submit(make_request("a", range(8), max_tokens=30))
    cell.run_to_end()
    end = cell.end("a")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert len(cell.output("a")) == 5  # all that the pool had room for


def test_half_computed_prompts_never_wait_for_each_other() -> None:
    cell = make_cell(make_spec(num_blocks=10, budget=4))
    cell.submit(make_request("a", range(24), max_tokens=2))
    cell.submit(make_request("b", range(30, 54), max_tokens=2))
    plan(cell)
    assert cell.scheduler.num_running_seqs == 1  # six of ten blocks are promised
    cell.run_to_end()
    cell.check_texts()


def test_a_head_that_does_not_fit_is_passed_only_so_often() -> None:
    cell = make_cell(make_spec(num_blocks=12, max_num_seqs=4))
    cell.submit(make_request("long", range(4), max_tokens=30))
    cell.submit(make_request("big", range(100, 140), max_tokens=2))
    for number in range(2 * MAX_TIMES_PASSED):
        cell.submit(make_request(f"s{number}", [number, 1], max_tokens=1))
    cell.run_to_end()
    ends = [run.request_id for run in (client.end for client in cell.clients.values()) if run]
    assert len(ends) == 2 * MAX_TIMES_PASSED + 2
    cell.check_texts()


def test_a_head_that_waited_long_keeps_the_lane() -> None:
    cell = make_cell(make_spec(num_blocks=12))
    cell.submit(make_request("running", range(4), max_tokens=30))
    plan(cell)
    cell.submit(make_request("big", range(100, 140), max_tokens=2))
    cell.submit(make_request("small", [1, 2], max_tokens=30))
    assert len(plan(cell).new_rows) == 1
    cell.apply()
    cell.now_ms += 2000
    cell.submit(make_request("later", [3, 4], max_tokens=1))
    assert plan(cell).new_rows == []
    cell.run_to_end()
    cell.check_texts()


# ---- ends


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
    cell.take(cell.scheduler.expire(49))
    plan(cell)
    cell.take(cell.scheduler.expire(50))
    error = cell.end("a").error
    assert error is not None
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    cell.run_to_end()


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


# ---- losses


def test_a_lost_lane_gives_its_sequences_to_another() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), n=2, max_tokens=12))
    for _ in range(4):
        cell.plan()
        cell.apply()
    cell.plan()
    cell.drop_lane("w0")
    assert cell.scheduler.num_waiting_seqs == 2
    cell.add_lane("w1", make_spec())
    cell.run_to_end()
    cell.check_texts()


def test_the_third_loss_in_a_row_ends_a_sequence() -> None:
    cell = make_cell()
    cell.submit(make_request("poison", range(4)))
    for number in range(1, 4):
        cell.plan(f"w{number - 1}")
        cell.drop_lane(f"w{number - 1}")
        cell.add_lane(f"w{number}", make_spec())
    error = cell.end("poison").error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL


def test_a_failed_step_starts_its_rows_over() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=8))
    cell.plan()
    cell.plan()
    cell.apply()
    cell.apply(fails=True)
    again = plan(cell)
    assert again.restart
    assert again.new_rows[0].token_ids == (*range(10), *cell.output("a"))
    cell.run_to_end()
    cell.check_texts()


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


def test_a_sequence_too_long_for_the_lane_that_is_left_blocks_nobody_and_ends_in_time() -> None:
    cell = make_cell(num_lanes=0)
    cell.add_lane("large", make_spec(num_blocks=30))
    cell.submit(make_request("long", range(80), max_tokens=4))
    plan(cell, "large")
    cell.drop_lane("large")
    cell.add_lane("small", make_spec(num_blocks=10))
    cell.submit(make_request("short", range(100, 108), max_tokens=4))
    cell.take(cell.scheduler.expire(cell.now_ms))
    cell.now_ms += MAX_HOMELESS_MS - 1
    while not cell.clients["short", 0].end:  # type: ignore[index]
        cell.plan("small")
        cell.apply("small")
    cell.take(cell.scheduler.expire(cell.now_ms))
    assert cell.clients["long", 0].end is None  # type: ignore[index]
    cell.now_ms += 1
    cell.take(cell.scheduler.expire(cell.now_ms))
    assert cell.end("long").finish_reason is FinishReason.ERROR


def test_the_next_leader_inherits_the_losses_of_the_prompt() -> None:
    cell = make_cell()
    cell.submit(make_request("poison", range(4), n=3, max_tokens=1))
    for number in range(1, 6):
        cell.plan(f"w{number - 1}")
        cell.drop_lane(f"w{number - 1}")
        cell.add_lane(f"w{number}", make_spec())
    ends = [cell.end("poison", index).finish_reason for index in range(3)]
    assert ends == [FinishReason.ERROR] * 3


# ---- attaching again


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
    assert [(run.sequence_idx, list(run.token_ids)) for run in runs] == [(0, text[1:2])]
    assert (runs[0].finish_reason, runs[0].usage) == (FinishReason.STOP, cell.end("a").usage)


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
    row = SampledRow(SeqId(1), 0, text[3:4], ["logprob of the fourth"])
    cell.scheduler.apply(LaneId("w0"), StepResult(StepId(1), sampled=[row]))
    runs = cell.scheduler.submit(make_request("a", range(6), delivered={0: Delivered(text[:3])}))
    assert [(run.first_token_idx, run.token_ids, run.logprobs) for run in runs] == [(3, text[3:4], row.logprobs)]


def test_a_request_whose_end_was_not_delivered_ends_at_once() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), max_tokens=8, delivered={0: Delivered(text)}))
    assert cell.end("a").finish_reason is FinishReason.LENGTH


# ---- many lanes, static batches


def test_a_request_goes_where_its_prefix_is() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(12), max_tokens=2))
    cell.plan("w1")
    cell.apply("w1")
    cell.run_to_end()
    cell.submit(make_request("b", range(12), max_tokens=2))
    assert cell.plan("w0") is None or not cell.in_flight[LaneId("w0")][-1].new_rows
    assert plan(cell, "w1").new_rows[0].num_computed_tokens == 8


def test_without_a_cached_prefix_the_emptier_lane_is_chosen() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(12)))
    plan(cell, "w0")
    cell.submit(make_request("b", range(20, 32)))
    cell.plan("w0")
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [2]


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
