"""Tenants share by served tokens: whose turn it is, what is charged, what a tenant may have at once."""

import pytest

from scheduler_svc.core.policy import MAX_PASSED_MS
from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.sequence import Tenant
from scheduler_svc.core.types import (
    Delivered,
    ErrorCode,
    FairnessPolicy,
    FinishReason,
    LaneId,
    SchedulerError,
)
from tests.scheduler.core.helpers import (
    BLOCK_SIZE,
    Cell,
    expected_of,
    make_cell,
    make_mixed_spec,
    make_request,
    make_spec,
    plan,
)

MIXED = parse_policy("native:1,int8:2,int4")

PROMPT_TOKENS = 4


def prompt_of(name: str) -> tuple[int, ...]:
    number = 100 * ord(name[0]) + 10 * int(name[1:])
    return tuple(range(number, number + PROMPT_TOKENS))


def submit(cell: Cell, names: str, *, max_tokens: int = 4) -> None:
    """Submit requests of equal size; the letters of a name are its tenant, as in `a0 a1 b0`."""
    for name in names.split():
        cell.submit(make_request(name, prompt_of(name), tenant=name[0], max_tokens=max_tokens))


def starts(cell: Cell, *, num_steps: int = 1000) -> str:
    """Run to the end, or some steps, one at a time; return the names of the requests that got a row, in order."""
    names = {tuple(request.prompt_token_ids): str(name) for name, request in cell.requests.items()}
    started = []
    for _ in range(num_steps):
        step = cell.plan()
        if step is None:
            break
        started += [names[tuple(row.token_ids[: row.num_prompt_tokens])] for row in step.new_rows]
        cell.apply()
    return " ".join(started)


def new_prompts(cell: Cell) -> list[tuple[int, ...]]:
    """Plan a step; return the prompts of its new rows."""
    return [tuple(row.token_ids) for row in plan(cell).new_rows]


def tenant(cell: Cell, name: str) -> Tenant:
    return cell.queue.tenant(name)


def served_tokens(cell: Cell, name: str) -> float:
    """Return what a tenant of weight 1, who never waited behind another, was charged."""
    return tenant(cell, name).counter


# ---- whose turn


def test_a_tenant_with_one_request_does_not_wait_for_anothers_backlog() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0 a1 a2 a3")
    plan(cell)
    cell.apply()
    submit(cell, "b0")
    assert starts(cell) == "b0 a1 a2 a3"


def test_backlogs_take_turns_whatever_their_sizes() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0 a1 a2 a3 b0 b1 c0")
    assert starts(cell) == "a0 b0 c0 a1 b1 a2 a3"


def test_what_counts_is_tokens_not_requests() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0 a1", max_tokens=12)
    submit(cell, "b0 b1 b2", max_tokens=4)
    assert starts(cell) == "a0 b0 b1 a1 b2"  # 16 tokens against 8


def test_a_weight_is_a_share() -> None:
    cell = make_cell(make_spec(max_num_seqs=1), fairness=FairnessPolicy({"a": 2.0}))
    submit(cell, "a0 a1 a2 a3 a4 b0 b1 b2")
    assert starts(cell) == "a0 b0 a1 a2 b1 a3 a4 b2"


def test_inside_a_tenant_priority_comes_before_age() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    cell.submit(make_request("a-late", range(4), tenant="a", priority=1))
    cell.submit(make_request("a-soon", range(10, 14), tenant="a"))
    cell.submit(make_request("b-late", range(20, 24), tenant="b", priority=5))
    assert starts(cell) == "a-soon b-late a-late"


def test_a_tenant_back_from_idle_starts_where_the_others_are() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0 a1 a2 a3 a4 a5 b0")
    assert starts(cell, num_steps=8) == "a0 b0"
    submit(cell, "a6 a7")
    assert starts(cell, num_steps=8) == "a1 a2"
    submit(cell, "b1 b2 b3")
    assert starts(cell) == "b1 a3 b2 a4 b3 a5 a6 a7"  # not all of b's at once


def test_leaving_for_a_moment_wipes_out_nothing() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0", max_tokens=30)
    submit(cell, "b0 b1 b2")
    plan(cell)
    while cell.clients["a0", 0].end is None:  # type: ignore[index]
        cell.apply()
        cell.plan()
    cell.expire()
    assert tenant(cell, "a").num_waiting_seqs == tenant(cell, "a").num_running_seqs == 0
    submit(cell, "a1")
    cell.apply()
    assert starts(cell) == "b1 b2 a1"


def test_what_was_let_in_before_a_restart_goes_before_all_that_is_new() -> None:
    cell = make_cell(make_spec(max_num_seqs=1))
    submit(cell, "a0 a1 b0")
    for number in range(3):
        prompt = range(10 * number, 10 * number + 4)
        cell.submit(make_request(f"c{number}", prompt, tenant="c", max_tokens=4, is_resubmit=True))
    assert starts(cell) == "c0 c1 c2 a0 b0 a1"


def test_a_tenants_first_prompt_goes_before_the_half_computed_one_of_another() -> None:
    """And goes on before them: the other has more rows."""
    cell = make_cell(make_spec(budget=8))
    submit(cell, "a0", max_tokens=40)
    cell.submit(make_request("a", range(40), tenant="a", max_tokens=1))
    submit(cell, "a1")
    assert new_prompts(cell) == [prompt_of("a0"), tuple(range(40))]
    cell.submit(make_request("b", range(100, 121), tenant="b", max_tokens=1))
    assert new_prompts(cell) == [tuple(range(100, 121))]  # 7 of its 21 tokens: one decodes
    scheduled = []
    for _ in range(3):
        cell.apply()
        rows = plan(cell).continued_rows
        scheduled.append([(row.seq_id, row.num_scheduled_tokens) for row in rows if row.seq_id != 1])
    assert scheduled == [[(4, 7)], [(4, 7)], [(2, 7)]]
    cell.run_to_end()
    cell.check_texts()


def test_first_prompts_of_two_tenants_take_turns() -> None:
    cell = make_cell(make_spec(budget=8))
    cell.submit(make_request("a", range(40), tenant="a", max_tokens=1))
    plan(cell)
    cell.submit(make_request("b", range(100, 124), tenant="b", max_tokens=1))
    assert new_prompts(cell) == [tuple(range(100, 124))]
    scheduled = []
    for _ in range(4):
        cell.apply()
        scheduled += [row.seq_id for row in plan(cell).continued_rows]
    assert scheduled == [1, 1, 2, 1]  # a:b is 8:16, 16:16 (a is older), 24:16, 24:24
    cell.run_to_end()
    cell.check_texts()


def test_of_one_tenant_the_half_computed_prompt_goes_first() -> None:
    cell = make_cell(make_spec(budget=8))
    cell.submit(make_request("a", range(100, 140), tenant="a", max_tokens=1))
    plan(cell)
    submit(cell, "a1 c1")
    cell.abort("c1")
    assert [row.num_scheduled_tokens for row in plan(cell).continued_rows] == [8]


def test_requests_that_do_not_fit_hide_nobody() -> None:
    cell = make_cell(make_spec(num_blocks=12))
    cell.submit(make_request("running", range(4), tenant="a", max_tokens=30))
    plan(cell)
    for number in range(9):
        cell.submit(make_request(f"big{number}", range(100 * number, 100 * number + 46), tenant="a", max_tokens=1))
    submit(cell, "b0", max_tokens=1)
    assert new_prompts(cell) == [prompt_of("b0")]


def test_a_head_that_waited_long_keeps_the_lane_from_those_who_were_served_more() -> None:
    cell = make_cell(make_spec(num_blocks=12))
    submit(cell, "b0", max_tokens=30)
    plan(cell)
    cell.submit(make_request("big", range(100, 140), tenant="a", max_tokens=2))
    submit(cell, "b1", max_tokens=8)
    assert len(plan(cell).new_rows) == 1
    cell.apply()
    cell.now_ms += MAX_PASSED_MS
    submit(cell, "b2", max_tokens=1)
    assert plan(cell).new_rows == []  # a's counter is the lowest
    submit(cell, "c0", max_tokens=1)
    cell.apply()
    assert plan(cell).new_rows == [], "c starts where the queue is, behind a"
    cell.run_to_end()
    cell.check_texts()


# ---- what is charged


def test_prompt_and_output_are_charged_once() -> None:
    cell = make_cell(make_spec(budget=3))
    cell.submit(make_request("a", range(10), tenant="a", max_tokens=7))
    cell.submit(make_request("b", range(10), tenant="b", max_tokens=7))
    plan(cell)
    assert served_tokens(cell, "a") == 3
    cell.run_to_end()
    assert (served_tokens(cell, "a"), served_tokens(cell, "b")) == (17, 17)


def test_output_is_charged_at_block_borders() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), tenant="a", max_tokens=20))
    served = []
    for _ in range(9):
        plan(cell)
        cell.apply()
        served.append(served_tokens(cell, "a"))
    assert served == [4, 5, 5, 5, 8, 9, 9, 9, 12]
    cell.abort("a")
    assert served_tokens(cell, "a") == 13


def test_cached_tokens_are_free() -> None:
    cell = make_cell()
    for name in ("first", "again"):
        cell.submit(make_request(name, range(12), tenant="a", max_tokens=3))
        cell.run_to_end()
    assert served_tokens(cell, "a") == 12 + 3 + 4 + 3


def test_replays_are_free() -> None:
    cell = make_cell(make_spec(budget=8), prefix_caching=False)
    cell.submit(make_request("a", range(8), tenant="a", max_tokens=12))
    for _ in range(4):
        plan(cell)
        cell.apply()
    cell.drop_lane("w0")
    cell.add_lane("w1", make_spec(budget=3))
    cell.run_to_end()
    assert served_tokens(cell, "a") == 20


def test_an_aborted_prompt_is_charged_as_far_as_it_was_computed() -> None:
    cell = make_cell(make_spec(budget=8))
    cell.submit(make_request("a", range(30), tenant="a"))
    plan(cell)
    cell.abort("a")
    assert served_tokens(cell, "a") == 8


def test_samples_share_the_charge_for_their_prompt() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), tenant="a", n=3, max_tokens=5))
    cell.run_to_end()
    assert served_tokens(cell, "a") == 10 + 3 * 5


def test_what_was_delivered_before_a_restart_is_free() -> None:
    cell = make_cell()
    text = expected_of(make_request("a", range(6), max_tokens=8))
    cell.submit(make_request("a", range(6), tenant="a", max_tokens=8, delivered={0: Delivered(text[:5])}))
    cell.run_to_end()
    assert served_tokens(cell, "a") == 3


# ---- the books


def test_tenants_that_are_gone_leave_no_record() -> None:
    cell = make_cell(make_spec(max_num_seqs=2))
    cell.submit(make_request("long", range(8), tenant="long", max_tokens=900))
    plan(cell)
    for number in range(100):
        prompt = range(10 + number, 14 + number)
        cell.submit(make_request(f"r{number}", prompt, tenant=f"t{number}", max_tokens=2))
        while cell.clients[f"r{number}", 0].end is None:  # type: ignore[index]
            cell.apply()
            cell.plan()
        cell.expire()
        assert cell.queue.num_tenants <= 3
    cell.abort("long")
    cell.expire()
    assert cell.queue.num_tenants == 0


def test_an_idle_cell_has_no_records() -> None:
    cell = make_cell()
    submit(cell, "a0", max_tokens=30)
    submit(cell, "b0", max_tokens=1)
    cell.run_to_end()
    cell.expire()
    assert cell.queue.num_tenants == 0


# ---- limits


def test_a_tenant_at_its_limit_waits_and_blocks_nobody() -> None:
    cell = make_cell(fairness=FairnessPolicy(max_running_seqs=2))
    submit(cell, "a0 a1 a2 b0")
    assert new_prompts(cell) == [prompt_of(name) for name in ("a0", "b0", "a1")]
    assert (tenant(cell, "a").num_running_seqs, tenant(cell, "a").num_waiting_seqs) == (2, 1)
    cell.abort("a0")
    assert new_prompts(cell) == [prompt_of("a2")]
    cell.run_to_end()
    cell.check_texts()


def test_more_samples_than_a_tenant_may_run_take_turns() -> None:
    cell = make_cell(fairness=FairnessPolicy(max_running_seqs=2))
    cell.submit(make_request("a", range(10), tenant="a", n=5))
    cell.run_to_end()
    cell.check_texts()
    assert {client.end.finish_reason for client in cell.clients.values() if client.end} == {FinishReason.LENGTH}


def test_a_tenant_takes_no_more_than_its_share_of_a_lanes_blocks() -> None:
    cell = make_cell(make_spec(num_blocks=16, budget=100), fairness=FairnessPolicy(max_kv_share=0.5))
    for number in range(3):
        prompt = range(20 * number, 20 * number + 16)
        cell.submit(make_request(f"a{number}", prompt, tenant="a", max_tokens=1))
    cell.submit(make_request("b", range(200, 216), tenant="b", max_tokens=1))
    assert [row.token_ids[0] for row in plan(cell).new_rows] == [0, 200, 20]
    cell.run_to_end()
    cell.check_texts()


def test_a_share_counts_the_room_that_blocks_take_in_their_formats() -> None:
    fairness = FairnessPolicy(max_kv_share=0.2)  # of 160 native blocks
    cell = make_cell(make_mixed_spec(80, budget=300), precision=MIXED, fairness=fairness)
    for number in range(4):  # of 16 blocks, with the room of 8.1 native ones: 2 native, 2 int8, 12 int4
        prompt = range(100 * number, 100 * number + 16 * BLOCK_SIZE)
        cell.submit(make_request(f"a{number}", prompt, tenant="a", max_tokens=1))
    assert len(plan(cell).new_rows) == 3
    cell.run_to_end()


def test_a_lane_that_a_share_closes_is_not_waited_for() -> None:
    spec, fairness = make_spec(num_blocks=256, budget=500), FairnessPolicy(max_kv_share=0.5)
    cell = make_cell(spec, num_lanes=2, fairness=fairness)
    cell.submit(make_request("a0", range(400), tenant="a", max_tokens=30))
    plan(cell, "w0")
    cell.apply("w0")
    cell.submit(make_request("a1", range(432), tenant="a", max_tokens=1))  # most of it is in w0
    assert len(plan(cell, "w1").new_rows) == 1
    cell.run_to_end()
    cell.check_texts()


def test_a_request_larger_than_its_tenants_share_runs_when_the_tenant_has_nothing_else() -> None:
    cell = make_cell(make_spec(num_blocks=16, budget=100), fairness=FairnessPolicy(max_kv_share=0.25))
    submit(cell, "a0")
    cell.submit(make_request("a-large", range(200, 240), tenant="a", max_tokens=4))
    submit(cell, "a1")
    assert starts(cell) == "a0 a-large a1"
    cell.check_texts()


def test_of_two_tenants_the_one_with_most_kv_is_preempted() -> None:
    cell = make_cell(make_spec(num_blocks=8))
    submit(cell, "a0 a1", max_tokens=16)
    plan(cell)
    submit(cell, "b0", max_tokens=16)  # the newest
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions >= 1
    cell.check_texts()


def test_a_tenants_only_row_is_spared_while_another_has_several() -> None:
    cell = make_cell(make_spec(num_blocks=9))
    submit(cell, "a0 a1", max_tokens=24)
    plan(cell)
    submit(cell, "b0", max_tokens=24)
    while not cell.scheduler.counters.preemptions:
        cell.plan()
        cell.apply()
    assert (tenant(cell, "a").num_running_seqs, tenant(cell, "b").num_running_seqs) == (1, 1)
    cell.run_to_end()
    cell.check_texts()


def test_who_holds_most_is_told_by_weight() -> None:
    cell = make_cell(make_spec(num_blocks=13), fairness=FairnessPolicy({"a": 4.0}))
    submit(cell, "b0 b1", max_tokens=24)
    plan(cell)
    submit(cell, "a0 a1 a2 a3", max_tokens=24)
    while not cell.scheduler.counters.preemptions:
        cell.plan()
        cell.apply()
    assert (tenant(cell, "a").num_running_seqs, tenant(cell, "b").num_running_seqs) == (4, 1)
    cell.run_to_end()
    cell.check_texts()


# ---- bounds and deadlines


def test_a_tenant_that_fills_the_queue_takes_no_place_from_another() -> None:
    cell = make_cell(num_lanes=0, max_queued_seqs=3)
    submit(cell, "a0 a1 a2")
    with pytest.raises(SchedulerError) as caught:
        submit(cell, "a3")
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED
    submit(cell, "b0 b1 c0")
    with pytest.raises(SchedulerError, match="6 sequences") as caught:
        submit(cell, "d0")
    assert caught.value.code is ErrorCode.RESOURCE_EXHAUSTED


def test_a_deadline_gives_everything_back() -> None:
    cell = make_cell(make_spec(max_num_seqs=2, budget=8))
    cell.submit(make_request("running", range(20), tenant="a", n=3, deadline_ms=50))
    plan(cell)
    cell.submit(make_request("waiting", range(40, 60), tenant="a", n=2, deadline_ms=50))
    cell.expire(50)
    for client in cell.clients.values():
        assert client.end is not None
        assert client.end.error is not None
        assert client.end.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert cell.scheduler.request_ids() == set()
    cell.apply()
    stats = cell.scheduler.lane_stats(LaneId("w0"))
    assert (stats.num_running_seqs, stats.num_free_blocks + stats.num_cached_blocks) == (0, stats.num_blocks)
    cell.expire()
    assert cell.queue.num_tenants == 0
