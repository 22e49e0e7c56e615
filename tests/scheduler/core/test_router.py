"""Which of several lanes a request goes to."""

import random

import pytest

from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.types import FairnessPolicy, LaneId
from tests.scheduler.core.helpers import Cell, make_cell, make_mixed_spec, make_request, make_spec, plan


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


def test_requests_with_a_common_prefix_spread_when_its_lane_has_more_to_do() -> None:
    cell = make_cell(make_spec(max_num_seqs=32, budget=64), num_lanes=2)
    cell.submit(make_request("first", range(48), max_tokens=2))
    cell.plan("w0")
    cell.apply("w0")
    cell.run_to_end()
    for number in range(16):
        cell.submit(make_request(f"r{number}", [*range(48), 100 + number], max_tokens=8))
    for _ in range(4):
        for lane_id in cell.workers:
            cell.plan(lane_id)
            cell.apply(lane_id)
    rows = sorted(map(cell.scheduler.num_rows, cell.workers))
    assert rows[1] <= 1.5 * rows[0]
    cell.run_to_end()
    cell.check_texts()


def test_a_busy_lane_is_waited_for_only_by_one_that_has_rows_and_where_it_has_fewer() -> None:
    cell = make_cell(make_spec(budget=8), num_lanes=2)
    cell.submit(make_request("a", range(4)))
    plan(cell, "w0")
    plan(cell, "w0")  # two steps in flight: it cannot plan
    cell.submit(make_request("b", range(10, 14)))
    assert len(plan(cell, "w1").new_rows) == 1  # it was idle
    cell.submit(make_request("c", range(20, 24)))
    assert len(plan(cell, "w1").new_rows) == 1  # no fewer rows there
    cell.submit(make_request("d", range(30, 34)))
    cell.apply("w1")
    assert plan(cell, "w1").new_rows == []  # there are
    cell.apply("w0")
    assert len(plan(cell, "w0").new_rows) == 1


def test_a_lane_that_is_too_small_is_not_waited_for() -> None:
    cell = make_cell(num_lanes=0, precision=parse_policy("native:1,int8"))
    cell.add_lane("large", make_mixed_spec(40))
    cell.add_lane("small", make_mixed_spec(8))
    cell.submit(make_request("first", range(8), max_tokens=40))
    plan(cell, "large")
    cell.submit(make_request("second", range(100, 200), max_tokens=4))
    assert cell.plan("small") is None or not cell.in_flight[LaneId("small")][-1].new_rows
    assert len(plan(cell, "large").new_rows) == 1
    cell.run_to_end()
    cell.check_texts()


def test_prompts_that_are_being_computed_count_until_they_are() -> None:
    cell = make_cell(make_spec(256, max_num_seqs=16, budget=1000), num_lanes=2)
    cell.submit(make_request("short", range(4), n=2))
    plan(cell, "w0")
    cell.submit(make_request("long", range(1000, 1400)))
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [3]
    cell.submit(make_request("next", range(2000, 2400)))
    assert plan(cell, "w1").new_rows == []  # it has a row, the other lane two, and hardly a prompt
    assert 4 in [row.seq_id for row in plan(cell, "w0").new_rows]


def make_full_cell_with_a_prefix_on_w0(num_free_rows: int = 1, fairness: FairnessPolicy | None = None) -> Cell:
    """Return a cell of two lanes: w0 is full and holds the prefix range(12), w1 has rows left."""
    cell = make_cell(make_spec(max_num_seqs=2, budget=32), num_lanes=1, fairness=fairness)
    cell.add_lane("w1", make_spec(max_num_seqs=1 + num_free_rows, budget=32))
    cell.submit(make_request("prefix", range(13), max_tokens=60))
    plan(cell, "w0")
    cell.apply("w0")
    cell.submit(make_request("one", range(100, 110), max_tokens=60))
    plan(cell, "w1")
    cell.submit(make_request("two", range(200, 210), max_tokens=60))
    plan(cell, "w0")
    cell.apply("w1")
    assert [cell.scheduler.num_rows(lane_id) for lane_id in cell.workers] == [2, 1]
    return cell


def test_where_more_wait_than_have_room_a_full_lane_keeps_those_of_its_prefixes() -> None:
    cell = make_full_cell_with_a_prefix_on_w0()
    cell.submit(make_request("of the prefix", [*range(12), 50]))
    cell.submit(make_request("of none", range(300, 310)))
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [5]
    cell.abort("two")
    cell.apply("w0")
    assert [(row.seq_id, row.num_computed_tokens) for row in plan(cell, "w0").new_rows] == [(4, 12)]
    cell.run_to_end()
    cell.check_texts()


def test_room_that_nobody_else_wants_goes_to_one_whose_prefix_is_elsewhere() -> None:
    cell = make_full_cell_with_a_prefix_on_w0()
    cell.submit(make_request("a", [*range(12), 50]))
    cell.submit(make_request("b", [*range(12), 60]))
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [4]


def test_where_there_is_room_for_all_nobody_is_passed_for_a_prefix() -> None:
    cell = make_full_cell_with_a_prefix_on_w0(num_free_rows=2)
    cell.submit(make_request("of the prefix", [*range(12), 50]))
    cell.submit(make_request("of none", range(300, 310)))
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [4, 5]


def test_a_limit_reached_by_others_holds_for_one_that_was_passed_for_its_prefix() -> None:
    cell = make_full_cell_with_a_prefix_on_w0(num_free_rows=2, fairness=FairnessPolicy(max_running_seqs=4))
    cell.submit(make_request("of the prefix", [*range(12), 50]))
    for number in range(2):
        cell.submit(make_request(f"r{number}", range(300 + 20 * number, 310 + 20 * number)))
    assert [row.seq_id for row in plan(cell, "w1").new_rows] == [5]


def test_a_request_is_not_passed_for_its_prefix_for_ever() -> None:
    cell = make_full_cell_with_a_prefix_on_w0()
    cell.submit(make_request("of the prefix", [*range(12), 50]))
    for number in range(3):
        cell.submit(make_request(f"r{number}", range(300 + number, 310 + number), max_tokens=2))
    new_rows = []
    while 4 not in new_rows:
        new_rows += [row.seq_id for row in plan(cell, "w1").new_rows]
        cell.apply("w1")
        cell.now_ms += 1000
    assert new_rows == [5, 4]


def test_what_comes_in_calls_the_best_lane_that_can_plan_and_no_other() -> None:
    cell = make_cell(num_lanes=8)
    cell.submit(make_request("a", range(12), max_tokens=2))
    assert cell.scheduler.take_called() == ["w0"]
    plan(cell, "w0")
    cell.submit(make_request("b", range(20, 32)))
    assert cell.scheduler.take_called() == ["w1"]
    assert cell.scheduler.take_called() == []


def test_a_lane_that_leaves_a_request_to_a_better_one_calls_that() -> None:
    cell = make_cell(num_lanes=2)
    cell.submit(make_request("a", range(12)))
    plan(cell, "w0")
    cell.submit(make_request("b", range(20, 32)))
    cell.scheduler.take_called()
    cell.plan("w0")
    assert cell.scheduler.take_called() == ["w1"]


def test_a_fleet_that_is_busy_is_not_called() -> None:
    cell = make_cell(num_lanes=2)
    for number in range(2):
        cell.submit(make_request(f"r{number}", range(12 * number, 12 * number + 12)))
        plan(cell, f"w{number}")
    for lane_id in cell.workers:
        while cell.plan(lane_id) is not None:
            pass
    cell.scheduler.take_called()
    cell.submit(make_request("b", range(30, 42)))
    assert cell.scheduler.take_called() == []


@pytest.mark.parametrize("seed", range(20))
def test_lanes_that_plan_after_their_results_and_when_called_leave_nothing_waiting(seed: int) -> None:
    rng = random.Random(seed)
    cell = make_cell(make_spec(24, max_num_seqs=4), num_lanes=5)
    busy: list[LaneId] = []

    def plan_called() -> None:
        while called := cell.scheduler.take_called():
            for lane_id in called:
                plan_all(lane_id)

    def plan_all(lane_id: LaneId) -> None:
        while cell.plan(lane_id) is not None:
            busy.append(lane_id)

    def finish_a_step() -> None:
        lane_id = busy.pop(rng.randrange(len(busy)))
        cell.apply(lane_id)
        plan_all(lane_id)
        plan_called()

    for number in range(60):
        prompt = [rng.randrange(3)] * 12
        prompt += [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
        cell.submit(make_request(f"r{number}", prompt, max_tokens=rng.randrange(1, 12)))
        plan_called()
        for _ in range(min(len(busy), rng.randrange(4))):
            finish_a_step()
    while busy:
        finish_a_step()
    assert cell.scheduler.num_waiting_seqs == cell.scheduler.num_running_seqs == 0
    cell.check_texts()
