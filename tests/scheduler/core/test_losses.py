"""Lanes, steps and rows are lost; sequences start over, but not for ever."""

import pytest

from scheduler_svc.core.types import ErrorCode, FinishReason, LaneId, SampledRows, StepResult
from tests.scheduler.core.helpers import make_cell, make_request, make_spec, plan


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


@pytest.mark.parametrize("num_tokens", [20, 4])  # computed in two steps, so that nobody has forked yet, and in one
def test_a_prompt_lost_three_times_ends_all_samples_of_it(num_tokens: int) -> None:
    cell = make_cell()
    cell.submit(make_request("poison", range(num_tokens), n=3))
    for number in range(1, 4):
        cell.plan(f"w{number - 1}")
        cell.drop_lane(f"w{number - 1}")
        cell.add_lane(f"w{number}", make_spec())
    ends = [cell.end("poison", index).finish_reason for index in range(3)]
    assert ends == [FinishReason.ERROR] * 3


def test_the_next_leader_inherits_the_losses_of_the_prompt() -> None:
    cell = make_cell()
    cell.submit(make_request("poison", range(20), n=2))
    for number in range(1, 4):
        if number == 3:
            cell.abort("poison", 0)
        cell.plan(f"w{number - 1}")
        cell.drop_lane(f"w{number - 1}")
        cell.add_lane(f"w{number}", make_spec())
    assert cell.end("poison", 1).finish_reason is FinishReason.ERROR


def test_a_draining_lane_ends_what_it_has_and_gets_nothing_new() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(10), max_tokens=6))
    plan(cell, "w0")
    cell.scheduler.drain_lane(LaneId("w0"))
    cell.submit(make_request("b", range(10, 20), max_tokens=6))
    while (step := cell.plan("w0")) is not None or cell.in_flight[LaneId("w0")]:
        assert step is None or not step.new_rows
        assert not cell.scheduler.is_drained(LaneId("w0"))
        cell.apply("w0")
    assert cell.end("a").finish_reason is FinishReason.LENGTH
    assert cell.scheduler.is_drained(LaneId("w0"))
    cell.drop_lane("w0")
    assert cell.scheduler.counters.worker_losses == 0
    cell.run_to_end()
    cell.check_texts()


def test_a_draining_lane_that_dies_with_rows_is_a_loss() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(10), max_tokens=6))
    plan(cell, "w0")
    cell.scheduler.drain_lane(LaneId("w0"))
    cell.drop_lane("w0")
    assert cell.scheduler.counters.worker_losses == 1
    cell.run_to_end()
    cell.check_texts()


def test_what_another_lane_says_of_a_sequence_does_not_count() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(10), max_tokens=6))
    cell.submit(make_request("b", range(20, 30), max_tokens=6))
    first = plan(cell, "w0")
    second = plan(cell, "w1")
    true = cell.workers[LaneId("w1")].run(cell.in_flight[LaneId("w1")].popleft()).sampled
    told = SampledRows([*true.seq_ids, first.new_rows[0].seq_id], [*true.seq_epochs, 0], [*true.token_ids, 7])
    cell.take(cell.scheduler.apply(LaneId("w1"), StepResult(second.step_id, sampled=told)))
    assert (len(cell.output("b")), cell.output("a")) == (1, [])
    cell.run_to_end()
    cell.check_texts()
