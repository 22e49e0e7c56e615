"""Which of several lanes a request goes to."""

from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.types import LaneId
from tests.scheduler.core.helpers import make_cell, make_mixed_spec, make_request, make_spec, plan


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
