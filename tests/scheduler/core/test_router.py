"""Which of several lanes a request goes to."""

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


def test_one_that_does_not_fit_is_passed_by_those_whose_prefix_is_elsewhere_too() -> None:
    num_prefixes = 250
    cell = make_cell(make_spec(1600, max_num_seqs=2, budget=32, max_model_len=9000), num_lanes=1)
    for number in range(num_prefixes):
        cell.submit(make_request(f"prefix {number}", [1000 + number] * 13, max_tokens=1))
    cell.run_to_end()
    for number in range(2):
        cell.submit(make_request(f"fills w0 {number}", [number], max_tokens=3000))
    plan(cell, "w0")
    cell.add_lane("w1", make_spec(16, max_num_seqs=3, budget=64))
    num_submitted = 0

    def keep_eight_waiting() -> None:
        nonlocal num_submitted
        while cell.scheduler.num_waiting_seqs < 8:
            prompt = [1000 + num_submitted] * 12 + [6]
            cell.submit(make_request(f"r{num_submitted}", prompt, max_tokens=6 + num_submitted % 5))
            num_submitted += 1

    cell.submit(make_request("one", range(100, 104), max_tokens=2))
    keep_eight_waiting()
    plan(cell, "w1")
    cell.submit(make_request("large", range(500, 556), max_tokens=2, priority=-1))  # fits in w1 when that is empty
    large = next(seq for seq in cell.queue if seq.job.request.request_id == "large")
    while large.lane_id is None and num_submitted < num_prefixes:
        keep_eight_waiting()
        cell.now_ms += 50
        cell.plan("w1")
        cell.apply("w1")
    assert large.lane_id == "w1"
    assert cell.now_ms > 1000  # it was not simply the first
