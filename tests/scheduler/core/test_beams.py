"""A beam search finds what a plain one finds, on tables that its beams share, whatever happens to its rows."""

from dataclasses import dataclass, field

import pytest

from scheduler_svc.core import planner
from scheduler_svc.core.ends import MAX_HOMELESS_MS
from scheduler_svc.core.losses import MAX_LOSSES
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.types import (
    BeamParams,
    Delivered,
    Entry,
    ErrorCode,
    FailedRow,
    FairnessPolicy,
    FinishReason,
    LaneId,
    PickedLogprobs,
    Request,
    RequestId,
    SampledRows,
    SchedulerError,
    SeqId,
    StepPlan,
    StepResult,
    TokenRun,
)
from tests.scheduler.core.fake_model import Top, expected_beams
from tests.scheduler.core.fake_worker import FakeWorker, Row
from tests.scheduler.core.helpers import (
    Cell,
    entries,
    expected_of,
    make_cell,
    make_mixed_spec,
    make_request,
    make_spec,
    plan,
)

STOPS = range(12)  # of 50 tokens: beams end often


def make_search(name: str = "a", n: int = 3, **fields: object) -> Request:
    options: dict[str, object] = {"prompt": range(10), "max_tokens": 8, "beams": BeamParams()} | fields
    return make_request(name, n=n, **options)  # type: ignore[arg-type]


@dataclass
class ScriptedWorker(FakeWorker):
    """Reports one thing after the prompt, and another after each output token."""

    first: Top = field(default_factory=lambda: Top([], []))
    default: Top = field(default_factory=lambda: Top([], []))

    def _sample(self, row: Row, prefix: int) -> Top:
        top = self.default if len(row.token_ids) > 10 else self.first
        row.token_ids.append(top.top_token_ids[0])
        return top


def make_scripted_cell(first: Top, default: Top) -> Cell:
    cell = make_cell()
    cell.workers[LaneId("w0")] = ScriptedWorker(4, first=first, default=default)
    return cell


def step(cell: Cell, name: str = "w0") -> StepPlan:
    """Plan a step and apply its result."""
    planned = plan(cell, name)
    cell.apply(name)
    return planned


def run_collecting(cell: Cell) -> list[TokenRun]:
    """Run to the end; return the terminal runs in the order in which they came."""
    cell.run_to_end()
    return [run for run in cell.runs if run.finish_reason is not None]


def num_referenced(cell: Cell, name: str = "w0") -> int:
    return sum(cell.scheduler.lane_stats(LaneId(name)).num_referenced_blocks)


def check_answers(cell: Cell, name: str = "a") -> None:
    request = cell.requests[RequestId(name)]
    for idx in range(request.n):
        assert cell.output(name, idx) == expected_of(request, idx)
        is_stopped = cell.output(name, idx)[-1] in request.ending.stop_token_ids
        assert cell.end(name, idx).finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


# ---- what it finds


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -2.0, 5.0])
@pytest.mark.parametrize("n", [1, 2, 3, 8, 16])
def test_answers_are_those_of_a_plain_search_in_order_of_their_scores(n: int, length_penalty: float) -> None:
    for seed in range(4):
        for stops in ((), STOPS):
            cell = make_cell(make_spec(num_blocks=200, max_num_seqs=16))
            search = make_search(
                n=n, beams=BeamParams(length_penalty), seed=seed, stops=stops, max_tokens=14, prompt=range(3)
            )
            cell.submit(search)
            cell.run_to_end()
            check_answers(cell)


def test_search_is_over_once_no_beam_can_come_to_be_an_answer() -> None:
    cell = make_cell()
    cell.submit(make_search(stops=range(30), beams=BeamParams(0.0), max_tokens=500))
    cell.run_to_end()
    assert cell.scheduler.counters.steps < 50
    shorter = make_cell()
    shorter.submit(make_search(stops=range(30), beams=BeamParams(0.0), max_tokens=60))
    shorter.run_to_end()
    check_answers(shorter)
    assert [cell.output("a", idx) for idx in range(3)] == [shorter.output("a", idx) for idx in range(3)]


def test_equal_candidates_go_by_beam_and_then_by_token() -> None:
    cell = make_scripted_cell(Top([7, 5, 3, 9], [-1.0] * 4), Top([1, 2, 3, 4], [-1.0] * 4))
    cell.submit(make_search(n=2, max_tokens=2))
    cell.run_to_end()
    assert [cell.output("a", idx) for idx in range(2)] == [[3, 1], [3, 2]]


def test_only_twice_the_width_counts_of_what_a_row_reports() -> None:
    # A client may want more alternatives. With the third token the longer answer would be the better one.
    cell = make_scripted_cell(Top([1, 2, 5], [-1.0, -1.1, -1.2]), Top([5, 6], [-0.0, -9.0]))
    cell.submit(make_search(n=1, max_tokens=3, stops=(1, 2), beams=BeamParams(10.0)))
    cell.run_to_end()
    assert cell.output("a") == [1]


def test_logprobs_come_with_the_answers_where_they_are_wanted() -> None:
    cell = make_cell()
    cell.submit(make_search(n=2, max_tokens=3, beams=BeamParams(num_logprobs=1)))
    runs = run_collecting(cell)
    for run in runs:
        picked = [entry for entry in run.logprobs if isinstance(entry, PickedLogprobs)]
        assert len(picked) == 3
        for token_id, entry in zip(run.token_ids, picked, strict=True):
            assert entry.num_top == 1
            assert dict(zip(entry.top.top_token_ids, entry.top.top_logprobs, strict=True))[token_id] == entry.logprob


def test_clients_hear_nothing_but_that_it_begins_before_the_end() -> None:
    cell = make_cell()
    cell.submit(make_search())
    plan(cell)
    begun = cell.scheduler.submit(make_search())
    assert [(run.sequence_idx, run.token_ids, run.finish_reason) for run in begun] == [
        (idx, [], None) for idx in range(3)
    ]
    runs = run_collecting(cell)
    assert [(run.sequence_idx, run.first_token_idx, len(run.token_ids)) for run in runs] == [
        (idx, 0, 8) for idx in range(3)
    ]
    usages = [run.usage for run in runs]
    assert [(u.num_prompt_tokens, u.num_output_tokens) for u in usages if u] == [(10, 8)] * 3
    assert cell.scheduler.counters.output_tokens == 24


def test_prompt_is_served_from_the_cache() -> None:
    cell = make_cell()
    cell.submit(make_request("first", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_search())
    (new,) = plan(cell).new_rows
    assert new.num_computed_tokens == 8
    cell.run_to_end()
    check_answers(cell)
    usage = cell.end("a").usage
    assert usage is not None
    assert usage.num_cached_tokens == 8


def test_its_answers_are_found_in_the_cache() -> None:
    for seed in range(3):
        cell = make_cell(make_spec(num_blocks=200))
        cell.submit(make_search(seed=seed, max_tokens=24))
        cell.run_to_end()
        for idx in range(3):
            known = [*range(10), *cell.output("a", idx)]
            cell.submit(make_request(f"after {idx}", known, max_tokens=1))
            cell.run_to_end()
            usage = cell.end(f"after {idx}").usage
            assert usage is not None
            assert usage.num_cached_tokens == (len(known) - 1) // 4 * 4


# ---- its rows and tables


def test_children_share_the_parents_blocks_and_copy_its_tail() -> None:
    cell = make_cell()
    cell.submit(make_search())
    assert plan(cell).new_rows[0].entries == entries(0, 1, 2)
    cell.apply()
    second = plan(cell)
    # All three come from the prompt: the first goes on in its row, with the token that the search picked.
    assert [(row.entries, row.num_computed_tokens, row.num_scheduled_tokens) for row in second.new_rows] == [
        (entries(0, 1, 4), 10, 1),
        (entries(0, 1, 5), 10, 1),
    ]
    first_tokens = [output[0] for output in expected_beams(list(range(10)), 0, 3, 1.0, 1, frozenset())]
    assert second.picked_tokens == [(1, first_tokens[0])]
    assert [row.token_ids[10:] for row in second.new_rows] == [(first_tokens[1],), (first_tokens[2],)]
    assert [(patch.seq_id, patch.block_idx, patch.entry) for patch in second.patches] == [(1, 2, Entry(3 * 8))]
    assert second.ops.copy == [(Entry(16), Entry(24)), (Entry(16), Entry(32)), (Entry(16), Entry(40))]
    assert num_referenced(cell) == 5  # the prompt's two full blocks once, and three tails
    cell.run_to_end()
    check_answers(cell)


def test_beam_with_one_child_goes_on_in_its_row_without_a_copy() -> None:
    first = Top([1, 2, 3, 4], [-1.0, -1.1, -9.0, -9.0])
    cell = make_scripted_cell(first, Top([5, 6, 7, 8], [-1.0, -5.0, -9.0, -9.0]))
    cell.submit(make_search(n=2, max_tokens=3))
    step(cell)
    step(cell)
    third = step(cell)
    assert not any((third.new_rows, third.ops.copy, third.patches, third.finished_seq_ids))
    assert third.picked_tokens == [(1, 5), (2, 5)]
    assert [cell.output("a", idx) for idx in range(2)] == [[1, 5, 5], [2, 5, 5]]


def test_beam_without_a_child_gives_its_row_to_a_child_of_another() -> None:
    first = Top([1, 2, 3, 4], [-1.0, -8.0, -9.0, -9.0])
    cell = make_scripted_cell(first, Top([5, 6, 7, 8], [-1.0, -2.0, -9.0, -9.0]))
    cell.submit(make_search(n=2, max_tokens=3))
    step(cell)
    step(cell)
    third = step(cell)
    assert third.finished_seq_ids == [2]
    assert [(row.seq_id, row.seq_epoch, row.token_ids[10:]) for row in third.new_rows] == [(2, 1, (1, 6))]
    assert [row.seq_id for row in third.continued_rows] == [1]
    assert third.picked_tokens == [(1, 5)]
    assert [cell.output("a", idx) for idx in range(2)] == [[1, 5, 5], [1, 5, 6]]


def test_beams_do_not_look_ahead_while_others_do() -> None:
    cell = make_cell()
    cell.submit(make_search())
    plan(cell)
    assert cell.plan() is None
    cell.submit(make_request("b", range(20, 25), max_tokens=20))
    step(cell)
    # Both steps have the other's row; the beams wait for the result of the first of them.
    assert len(plan(cell).new_rows) == 2
    cell.apply()
    following = plan(cell)
    assert (following.new_rows, following.continued_rows, len(following.settled_seq_ids)) == ([], [], 1)
    cell.run_to_end()
    check_answers(cell)
    cell.check_texts()


def test_beams_of_which_a_step_cannot_tell_all_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_TOLD_TOKENS", 1)
    cell = make_cell(make_spec(num_blocks=200, max_num_seqs=16))
    cell.submit(make_search(n=8, max_tokens=14))
    while cell.scheduler.request_ids():
        assert len(step(cell).new_rows) <= 1
    check_answers(cell)


def test_eight_beams_hold_a_long_prompt_once_and_their_tails() -> None:
    cell = make_cell(make_spec(num_blocks=400, budget=256, max_model_len=2000))
    cell.submit(make_search(n=8, prompt=range(1001), max_tokens=12))
    while len(cell.workers[LaneId("w0")].rows) < 8:
        cell.plan()
        cell.apply()
    plan(cell)
    assert num_referenced(cell) == 250 + 8
    cell.run_to_end()
    check_answers(cell)


def test_search_keeps_a_row_for_each_beam_to_come() -> None:
    cell = make_cell(make_spec(max_num_seqs=4))
    cell.submit(make_search())
    cell.submit(make_request("b", range(20, 26), n=3, max_tokens=6))
    assert len(plan(cell).new_rows) == 2
    assert cell.scheduler.num_running_seqs == 2
    cell.run_to_end()
    check_answers(cell)
    cell.check_texts()


def test_search_waits_until_there_are_rows_for_all_its_beams() -> None:
    cell = make_cell(make_spec(max_num_seqs=3))
    cell.submit(make_request("b", range(20, 26), max_tokens=6))
    plan(cell)
    cell.submit(make_search())
    assert cell.plan() is not None
    assert cell.scheduler.num_running_seqs == 1
    cell.run_to_end()
    check_answers(cell)


@pytest.mark.parametrize("is_late", [False, True])
def test_search_wider_than_any_worker_is_refused(is_late: bool) -> None:
    cell = make_cell(make_spec(max_num_seqs=2), num_lanes=0 if is_late else 1)
    if not is_late:
        with pytest.raises(SchedulerError, match="width 3 is wider than the 2 rows") as caught:
            cell.submit(make_search())
        assert caught.value.param == "n"
        return
    cell.submit(make_search())
    cell.add_lane("w0", make_spec(max_num_seqs=2))
    errors = [cell.end("a", idx).error for idx in range(3)]
    assert [error.param for error in errors if error] == ["n"] * 3


def test_search_for_which_the_lanes_left_have_too_few_rows_ends_in_time() -> None:
    cell = make_cell()
    cell.submit(make_search())
    cell.drop_lane("w0")
    cell.add_lane("w1", make_spec(max_num_seqs=2))
    cell.expire()
    assert cell.plan("w1") is None
    cell.expire(MAX_HOMELESS_MS)
    assert {cell.end("a", idx).finish_reason for idx in range(3)} == {FinishReason.ERROR}


@pytest.mark.parametrize("policy", ["native:1,int8", "native:2,int4"])
def test_beams_share_narrowed_blocks(policy: str) -> None:
    cell = make_cell(make_mixed_spec(num_slabs=40), precision=parse_policy(policy))
    cell.submit(make_search(prompt=range(22), max_tokens=24))
    cell.run_to_end()
    check_answers(cell)
    assert cell.scheduler.counters.demoted_blocks > 5


def test_static_batches_have_beams_too() -> None:
    cell = make_cell(policy=SchedulingPolicy.STATIC)
    cell.submit(make_search())
    cell.submit(make_request("b", range(20, 26), n=2, max_tokens=12))
    cell.run_to_end()
    check_answers(cell)
    cell.check_texts()


# ---- ends


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_ends_it_in_every_state(num_steps: int) -> None:
    cell = make_cell()
    cell.submit(make_search())
    for _ in range(num_steps // 2):
        step(cell)
    if num_steps % 2:
        plan(cell)
    cell.abort("a")
    assert {cell.end("a", idx).finish_reason for idx in range(3)} == {FinishReason.ABORT}
    assert [cell.output("a", idx) for idx in range(3)] == [[], [], []]
    assert num_referenced(cell) == 0
    cell.abort("a")
    cell.run_to_end()


def test_abort_of_one_answer_leaves_the_others() -> None:
    cell = make_cell()
    cell.submit(make_search())
    for sequence_idx in (0, 2, 0):
        cell.abort("a", sequence_idx)
        step(cell)
    ends = [cell.end("a", idx) for idx in (0, 2)]
    assert [(end.finish_reason, end.first_token_idx) for end in ends] == [(FinishReason.ABORT, 0)] * 2
    cell.run_to_end()
    assert cell.output("a", 1) == expected_of(make_search(), 1)


def test_abort_of_the_last_answer_ends_the_search() -> None:
    cell = make_cell()
    cell.submit(make_search(n=2))
    step(cell)
    plan(cell)
    cell.abort("a", 0)
    assert cell.scheduler.num_running_seqs == 2
    cell.abort("a", 1)
    assert cell.scheduler.num_running_seqs == 0
    cell.run_to_end()


def test_a_deadline_ends_all_its_answers() -> None:
    cell = make_cell()
    cell.submit(make_search(deadline_ms=50))
    step(cell)
    plan(cell)
    cell.expire(50)
    errors = [cell.end("a", idx).error for idx in range(3)]
    assert [error.code for error in errors if error] == [ErrorCode.DEADLINE_EXCEEDED] * 3
    cell.run_to_end()


def test_a_lone_search_that_outgrows_the_pool_ends_with_an_error() -> None:
    cell = make_cell(make_spec(num_blocks=8))
    cell.submit(make_search(prompt=range(8), max_tokens=40))
    cell.run_to_end()
    errors = [cell.end("a", idx).error for idx in range(3)]
    assert [error.code for error in errors if error] == [ErrorCode.INVALID_ARGUMENT] * 3


def test_model_with_too_few_tokens_for_the_width_is_an_error() -> None:
    cell = make_scripted_cell(Top([1], [-1.0]), Top([1], [-1.0]))
    cell.submit(make_search(n=2, max_tokens=3))
    errors = [run.error for run in run_collecting(cell)]
    assert [error.param for error in errors if error] == ["n", "n"]


# ---- it starts over


@pytest.mark.parametrize("num_blocks", [9, 11])
@pytest.mark.parametrize("num_old_tokens", [2, 6, 9])
def test_preemption_takes_all_its_rows_and_it_starts_over(num_blocks: int, num_old_tokens: int) -> None:
    # Whichever beam it is that finds no block, and whoever has to make room for whom.
    cell = make_cell(make_spec(num_blocks=num_blocks))
    cell.submit(make_request("old", range(40, 40 + num_old_tokens), max_tokens=24))
    cell.submit(make_search(max_tokens=12))
    while cell.plan() is not None:
        cell.apply()
    assert cell.scheduler.counters.preemptions > 0
    assert cell.end("old").finish_reason is FinishReason.LENGTH
    cell.run_to_end()
    cell.check_texts()


def test_older_search_preempts_a_newer_one() -> None:
    cell = make_cell(make_spec(num_blocks=16))
    for name, start in (("a", 0), ("b", 20)):
        cell.submit(make_search(name, prompt=range(start, start + 8), max_tokens=14))
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions > 0
    check_answers(cell, "a")
    check_answers(cell, "b")


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_lost_worker_has_it_start_over_elsewhere(num_steps: int) -> None:
    cell = make_cell()
    cell.submit(make_search())
    for _ in range(num_steps):
        step(cell)
    cell.drop_lane("w0")
    cell.add_lane("w1", make_spec())
    (row,) = plan(cell, "w1").new_rows
    assert row.token_ids == tuple(range(10))
    cell.run_to_end()
    check_answers(cell)


def test_failed_step_has_it_start_over() -> None:
    cell = make_cell()
    cell.submit(make_search())
    step(cell)
    step(cell)
    cell.run_to_end()
    check_answers(cell)


@pytest.mark.parametrize("aborted_idxs", [[], [0]])  # then it starts over with another row
def test_failed_row_has_the_whole_search_start_over(aborted_idxs: list[int]) -> None:
    cell = make_cell()
    cell.submit(make_search())
    step(cell)
    for sequence_idx in aborted_idxs:
        cell.abort("a", sequence_idx)
    planned = plan(cell)
    cell.in_flight[LaneId("w0")].popleft()
    result = cell.workers[LaneId("w0")].run(planned)
    failed = FailedRow(SeqId(2), 0, "its logits are not finite")
    cell.take(
        cell.scheduler.apply(LaneId("w0"), StepResult(planned.step_id, failed_rows=[failed], sampled=result.sampled))
    )
    assert cell.scheduler.num_running_seqs == 0
    cell.run_to_end()
    cell.check_texts()
    assert cell.end("a", 2).finish_reason is FinishReason.LENGTH


def test_search_lost_too_often_without_getting_further_ends_with_an_error() -> None:
    cell = make_cell()
    cell.submit(make_search())
    for loss in range(MAX_LOSSES):
        assert cell.clients[RequestId("a"), 0].end is None, loss
        for _ in range(2):  # tokens that it had before, too, are no sign that it is not the cause
            step(cell, f"w{loss}")
        plan(cell, f"w{loss}")
        cell.drop_lane(f"w{loss}")
        cell.add_lane(f"w{loss + 1}", make_spec())
    errors = [cell.end("a", idx).error for idx in range(3)]
    assert [error.code for error in errors if error] == [ErrorCode.INTERNAL] * 3


def test_search_that_gets_further_each_time_is_not_the_cause() -> None:
    cell = make_cell()
    cell.submit(make_search())
    for loss in range(MAX_LOSSES + 2):
        for _ in range(loss + 1):
            step(cell, f"w{loss}")
        plan(cell, f"w{loss}")
        cell.drop_lane(f"w{loss}")
        cell.add_lane(f"w{loss + 1}", make_spec())
    cell.run_to_end()
    check_answers(cell)


def test_search_submitted_again_starts_over_and_gives_what_was_not_delivered() -> None:
    cell = make_cell()
    search = make_search()
    search.delivered[0] = Delivered(tuple(expected_of(search)), FinishReason.LENGTH)
    cell.submit(search)
    runs = run_collecting(cell)
    assert [run.sequence_idx for run in runs] == [1, 2]
    assert [cell.output("a", idx) for idx in (1, 2)] == [expected_of(search, idx) for idx in (1, 2)]


def test_search_of_which_all_was_delivered_is_not_made_again() -> None:
    cell = make_cell()
    search = make_search(n=1)
    search.delivered[0] = Delivered(tuple(expected_of(search)), FinishReason.LENGTH)
    cell.submit(search)
    assert cell.plan() is None
    assert cell.scheduler.request_ids() == set()


# ---- among tenants


@pytest.mark.parametrize("num_losses", [0, 2])
def test_tenant_is_charged_once_for_the_prompt_and_for_each_token_of_a_beam(num_losses: int) -> None:
    cell = make_cell()
    cell.submit(make_search(tenant="t"))
    for loss in range(num_losses):
        for _ in range(3):
            step(cell, f"w{loss}")
        cell.drop_lane(f"w{loss}")
        cell.add_lane(f"w{loss + 1}", make_spec())
    while cell.queue.tenant("t").num_seqs:
        served = cell.queue.tenant("t").counter
        step(cell, f"w{num_losses}")
    # The last step's, for the eighth tokens, are charged as it ends.
    assert served == 10 + 3 * 7


def test_search_counts_as_so_many_rows_of_its_tenant_as_it_may_have() -> None:
    cell = make_cell(fairness=FairnessPolicy(max_running_seqs=3))
    cell.submit(make_search(tenant="t"))
    cell.submit(make_request("b", range(20, 26), tenant="t", max_tokens=4))
    cell.submit(make_request("c", range(30, 36), tenant="u", max_tokens=4))
    step(cell)
    assert cell.scheduler.num_running_seqs == 4  # the three beams, and the other tenant's
    cell.run_to_end()
    check_answers(cell)
    cell.check_texts()
    with pytest.raises(SchedulerError, match="width 4 is wider than the 3 rows that a tenant may have"):
        cell.submit(make_search("d", n=4))


def test_oldest_search_is_never_preempted_for_other_tenants() -> None:
    cell = make_cell(make_spec(num_blocks=16))
    cell.submit(make_search(tenant="t", max_tokens=14))
    for idx in range(4):
        cell.submit(make_request(f"b{idx}", range(20 + idx, 26 + idx), tenant=f"u{idx}", max_tokens=20))
    steps = []
    while cell.clients[RequestId("a"), 0].end is None:
        steps.append(step(cell))
    prompts = [row for planned in steps for row in planned.new_rows if row.token_ids == tuple(range(10))]
    assert len(prompts) == 1
    check_answers(cell)
    assert cell.scheduler.counters.preemptions > 0
    cell.run_to_end()
    cell.check_texts()


def test_a_row_without_its_likeliest_tokens_has_failed() -> None:
    cell = make_cell()
    cell.submit(make_search(prompt=range(10), max_tokens=4))
    step = plan(cell)
    (row,) = step.new_rows
    cell.in_flight[LaneId("w0")].clear()
    bare = StepResult(step.step_id, sampled=SampledRows([row.seq_id], [row.seq_epoch], [7]))
    cell.take(cell.scheduler.apply(LaneId("w0"), bare))
    assert cell.scheduler.num_waiting_seqs == 3
    cell.scheduler.check_integrity()
