"""Lanes plan after their results, and when they are called: nobody waits beside a lane that could run it."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from scheduler_svc.core.planner import MAX_LEFT, MAX_UNFITTING
from scheduler_svc.core.policy import MAX_TIMES_PASSED, SchedulingPolicy
from scheduler_svc.core.types import LaneId, LaneSpec, RequestId
from tests.scheduler.core.helpers import Cell, make_cell, make_request, make_spec, plan

PREFIX = range(280)
LARGE = make_spec(2000, max_num_seqs=128, budget=2000, max_model_len=4000)


class CalledLanes:
    """Plans lanes as the scheduler's shell does between two ticks."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def idle(self) -> list[LaneId]:
        """Return the lanes without a step in flight."""
        return [lane_id for lane_id, steps in self.cell.in_flight.items() if not steps]

    def busy(self) -> list[LaneId]:
        return [lane_id for lane_id, steps in self.cell.in_flight.items() if steps]

    def plan_called(self) -> None:
        for _ in range(100):
            called = self.cell.scheduler.take_called()
            if not called:
                return
            for lane_id in called:
                self.plan_all(lane_id)
        raise AssertionError("lanes call each other for ever")

    def plan_all(self, lane_id: LaneId) -> None:
        while self.cell.plan(lane_id) is not None:
            pass

    def finish_a_step(self, lane_id: LaneId) -> None:
        self.cell.apply(lane_id)
        self.plan_all(lane_id)
        self.plan_called()

    def num_steps_beside_idle(self) -> int:
        """Return how many steps of the others end while something waits and a lane idles."""
        num_steps = 0
        while self.cell.scheduler.num_waiting_seqs and self.idle() and num_steps < 100:
            self.finish_a_step(self.busy()[0])
            num_steps += 1
        return num_steps


def make_lanes(spec: LaneSpec | None = None, **settings: object) -> CalledLanes:
    return CalledLanes(make_cell(spec, num_lanes=2, **settings))  # type: ignore[arg-type]


def hold_prefix_in_w0(lanes: CalledLanes) -> None:
    """Have w0 compute the prefix, and give it a row that goes on."""
    lanes.cell.submit(make_request("prefix", PREFIX, max_tokens=1))
    lanes.plan_called()
    while lanes.cell.clients[RequestId("prefix"), 0].end is None:
        lanes.finish_a_step(LaneId("w0"))
    lanes.cell.submit(make_request("row", [*PREFIX[:4], 1], max_tokens=100))
    lanes.plan_called()
    assert [lanes.cell.scheduler.num_rows(lane_id) for lane_id in lanes.cell.workers] == [1, 0]


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


def test_two_that_come_at_once_do_not_wait_for_the_same_lane() -> None:
    lanes = make_lanes(make_spec(256, budget=16))
    for name in ("a", "b"):
        lanes.cell.submit(make_request(name, range(100)))
    lanes.plan_called()
    assert lanes.num_steps_beside_idle() == 0


def test_what_finds_the_lane_of_its_prefix_full_goes_to_the_idle_one() -> None:
    lanes = make_lanes(make_spec(256, budget=32, max_num_seqs=2))
    hold_prefix_in_w0(lanes)
    for number in range(2):
        lanes.cell.submit(make_request(f"r{number}", [*PREFIX, number], max_tokens=50))
    lanes.plan_called()
    assert lanes.num_steps_beside_idle() <= 2


def make_lane_that_holds(prefix: Sequence[int]) -> CalledLanes:
    """Return one lane, w0, that holds a prefix and has a row and two steps in flight."""
    lanes = CalledLanes(make_cell(LARGE))
    hold(lanes, LaneId("w0"), prefix)
    lanes.cell.submit(make_request("row", [77], max_tokens=100))
    lanes.plan_called()
    assert len(lanes.cell.in_flight[LaneId("w0")]) == 2
    return lanes


def hold(lanes: CalledLanes, lane_id: LaneId, prefix: Sequence[int]) -> None:
    """Have a lane compute a prefix."""
    lanes.cell.submit(make_request(f"prefix of {lane_id}", prefix, max_tokens=1))
    lanes.plan_all(lane_id)
    while lanes.cell.in_flight[lane_id]:
        lanes.cell.apply(lane_id)
        lanes.plan_all(lane_id)
    lanes.cell.scheduler.take_called()


def test_lanes_that_leave_a_burst_to_one_that_cannot_plan_yet_come_to_rest() -> None:
    prefix = range(2000)
    lanes = make_lane_that_holds(prefix)
    for name in ("w1", "w2"):
        lanes.cell.add_lane(name, LARGE)
    for number in range(2 * MAX_LEFT):
        lanes.cell.submit(make_request(f"r{number}", [*prefix, number], max_tokens=5))
        lanes.plan_called()


def test_lanes_of_unequal_size_do_not_call_each_other_for_ever() -> None:
    prefix = range(2000)
    lanes = make_lane_that_holds(prefix)
    lanes.cell.add_lane("w2", replace(LARGE, num_blocks=520))
    hold(lanes, LaneId("w2"), [*prefix[:40], 7])
    lanes.cell.add_lane("w1", LARGE)
    for number in range(MAX_LEFT + 46):
        tail = [number] * (200 if number < 20 else 1)  # the first are too large for w2
        prompt = [*prefix, *tail] if number < MAX_LEFT + 20 else [5000 + number]
        lanes.cell.submit(make_request(f"r{number}", prompt, max_tokens=5))
        lanes.plan_called()


def test_the_first_that_a_lane_does_not_come_to_is_handed_on() -> None:
    lanes = CalledLanes(make_cell(make_spec(100, max_num_seqs=16, budget=400, max_model_len=400)))
    lanes.cell.submit(make_request("row", [9] * 150, max_tokens=50))
    plan(lanes.cell, "w0")
    lanes.cell.add_lane("w1", make_spec(40, max_num_seqs=16, budget=400, max_model_len=160))
    for number in range(MAX_UNFITTING):
        lanes.cell.submit(make_request(f"large {number}", [50 + number] * 300, max_tokens=5))
    lanes.cell.submit(make_request("small", [1] * 30, max_tokens=5))
    lanes.cell.scheduler.take_called()
    plan(lanes.cell, "w0")
    assert lanes.cell.scheduler.take_called() == ["w1"]


def test_a_batch_that_is_closed_is_no_room() -> None:
    lanes = make_lanes(make_spec(256, budget=300), policy=SchedulingPolicy.STATIC)
    hold_prefix_in_w0(lanes)
    for _ in range(3):
        lanes.finish_a_step(LaneId("w0"))
    lanes.cell.submit(make_request("of the prefix", [*PREFIX, 5], max_tokens=2))
    lanes.plan_called()
    assert lanes.num_steps_beside_idle() == 0


def test_a_lane_that_is_kept_for_another_is_no_room() -> None:
    prefix = range(380)
    lanes = CalledLanes(make_cell(make_spec(200, max_num_seqs=16, budget=800, max_model_len=1000)))
    cell = lanes.cell
    hold(lanes, LaneId("w0"), prefix)
    cell.add_lane("w1", make_spec(100, max_num_seqs=16, budget=400, max_model_len=400))
    cell.submit(make_request("row", [9] * 250, max_tokens=300))
    plan(cell, "w0")
    cell.apply("w0")
    plan(cell, "w0")
    cell.submit(make_request("kept for", [8] * 700, max_tokens=2))  # too large for w1, and for w0 beside the row
    next(iter(cell.queue)).times_passed = MAX_TIMES_PASSED
    cell.submit(make_request("of the prefix", [*prefix, 4], max_tokens=5))
    num_steps = 0
    while cell.scheduler.num_waiting_seqs > 1:
        for lane_id in cell.workers:  # a tick
            lanes.plan_all(lane_id)
        cell.apply("w0")
        num_steps += 1
    assert num_steps <= 2


@pytest.mark.parametrize("seed", range(20))
def test_no_lane_idles_while_something_waits_that_it_would_take(seed: int) -> None:
    rng = random.Random(seed)
    lanes = CalledLanes(make_cell(make_spec(24, max_num_seqs=rng.choice([1, 2, 4])), num_lanes=5))
    cell = lanes.cell

    def check_idle() -> None:
        lanes.plan_called()
        for lane_id in lanes.idle():
            assert cell.plan(lane_id) is None, f"{lane_id} idled"

    for batch in range(30):
        for number in range(rng.randrange(4)):
            prompt = [rng.randrange(3)] * 12
            prompt += [rng.randrange(100) for _ in range(rng.randrange(1, 20))]
            cell.submit(make_request(f"r{batch}.{number}", prompt, max_tokens=rng.randrange(1, 12)))
        check_idle()
        for _ in range(rng.randrange(6)):
            if busy := lanes.busy():
                lanes.finish_a_step(rng.choice(busy))
                check_idle()
    while busy := lanes.busy():
        lanes.finish_a_step(rng.choice(busy))
        check_idle()
    assert cell.scheduler.num_waiting_seqs == cell.scheduler.num_running_seqs == 0
    cell.check_texts()
