"""Which of several lanes a request goes to."""

from scheduler_svc.core.types import LaneId
from tests.scheduler.core.helpers import make_cell, make_request, plan


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
