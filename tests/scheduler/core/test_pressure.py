"""More wanted than there is: who is preempted, who is passed, who waits."""

from scheduler_svc.core.policy import MAX_TIMES_PASSED
from scheduler_svc.core.types import ErrorCode, FinishReason
from tests.scheduler.core.helpers import make_cell, make_request, make_spec, plan


def test_the_newest_row_is_preempted_and_replays_its_tokens() -> None:
    cell = make_cell(make_spec(num_blocks=6))
    cell.submit(make_request("a", range(8), max_tokens=12))
    cell.submit(make_request("b", range(20, 28), max_tokens=12))
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions >= 1
    assert cell.end("a").finish_reason is FinishReason.LENGTH
    cell.check_texts()


def test_replayed_output_tokens_are_no_prompt_tokens() -> None:
    cell = make_cell(prefix_caching=False)
    cell.submit(make_request("a", range(8), max_tokens=12))
    for _ in range(4):
        cell.plan()
        cell.apply()
    assert cell.scheduler.counters.prompt_tokens == 8
    cell.drop_lane("w0")
    cell.add_lane("w1", make_spec(budget=3))
    cell.run_to_end()
    assert cell.scheduler.counters.prompt_tokens == 16


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
    assert end.error.code is ErrorCode.INVALID_ARGUMENT
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
