"""Blocks are narrowed as they age: when, from what, for whom; and what a narrowed block is to the cache."""

from dataclasses import replace

import pytest

from scheduler_svc.core.arena import entry_of, format_of
from scheduler_svc.core.mixed_kv import make_kv_manager
from scheduler_svc.core.precision import PrecisionError, parse_policy
from scheduler_svc.core.types import BlockId, Delivered, Entry, Format, LaneId, StepPlan
from tests.scheduler.core.helpers import Cell, expected_of, make_cell, make_mixed_spec, make_request, make_spec, plan

NATIVE, INT8, INT4 = Format.NATIVE, Format.INT8, Format.INT4


def make_mixed_cell(policy: str, floor: str | None = None, *, budget: int = 16, num_slabs: int = 32) -> Cell:
    return make_cell(make_mixed_spec(num_slabs, budget=budget), precision=parse_policy(policy, floor))


def native(block_id: int) -> Entry:
    return entry_of(BlockId(block_id), NATIVE)


def int8(block_id: int) -> Entry:
    return entry_of(BlockId(block_id), INT8)


def formats(entries: list[Entry]) -> list[Format]:
    return [format_of(entry) for entry in entries]


def row_formats(cell: Cell) -> list[list[Format]]:
    """Return the formats in each row's table, as the worker has it."""
    return [formats(row.entries) for row in cell.workers[LaneId("w0")].rows.values()]


def run_until(cell: Cell, name: str, num_tokens: int, sequence_idx: int = 0) -> None:
    """Step until the client has so many tokens, one step at a time."""
    for _ in range(200):
        if len(cell.output(name, sequence_idx)) >= num_tokens:
            return
        plan(cell)
        cell.apply()
    raise AssertionError("it never came so far")


def test_a_block_is_narrowed_in_the_step_after_the_next_one_filled_up() -> None:
    cell = make_mixed_cell("native:1,int8")
    cell.submit(make_request("a", range(11), max_tokens=12))
    plan(cell)
    assert not plan(cell).ops.requantize  # the step that fills the third block
    third = plan_after_apply(cell)
    assert third.ops.requantize == [(native(1), int8(512))]
    assert [(patch.block_idx, patch.entry) for patch in third.patches] == [(1, int8(512))]
    cell.run_to_end()
    cell.check_texts()


def plan_after_apply(cell: Cell) -> StepPlan:
    cell.apply()
    return plan(cell)


def test_all_but_the_first_the_newest_and_the_tail_are_narrowed() -> None:
    cell = make_mixed_cell("native:1,int8:2,int4", budget=64)
    cell.submit(make_request("a", range(26), max_tokens=8))
    plan(cell)
    second = plan(cell)
    # Past both borders already: each block is quantized once, straight to its format.
    assert [format_of(destination) for _, destination in second.ops.requantize] == [INT4, INT4, INT8, INT8]
    assert [format_of(source) for source, _ in second.ops.requantize] == [NATIVE] * 4
    cell.apply()
    cell.apply()
    assert row_formats(cell) == [[NATIVE, INT4, INT4, INT8, INT8, NATIVE, NATIVE]]
    cell.run_to_end()
    assert (
        cell.scheduler.counters.demoted_blocks == 4 + 2 * 2
    )  # two more blocks fill up, two blocks cross a border each
    cell.check_texts()


def test_a_place_that_was_left_waits_for_the_step_that_reads_it() -> None:
    cell = make_mixed_cell("native:1,int8")
    cell.submit(make_request("a", range(12), max_tokens=4))
    plan(cell)
    assert plan(cell).ops.requantize == [(native(1), int8(512))]
    cell.apply()
    assert cell.scheduler.lane_stats(LaneId("w0")).num_quarantined_blocks == 1
    cell.apply()
    assert cell.scheduler.lane_stats(LaneId("w0")).num_quarantined_blocks == 0


def test_the_worker_is_told_the_seal_once_the_new_place_was_written() -> None:
    cell = make_mixed_cell("native:1,int8")
    cell.submit(make_request("a", range(12), max_tokens=6))
    plan(cell)
    plan(cell)
    cell.apply()
    # Block 1 was computed and sealed, but in a place that step 2 leaves.
    assert [seal.entry for seal in plan(cell).seals] == [native(0), native(256)]
    cell.apply()
    assert [seal.entry for seal in plan(cell).seals] == [int8(512)]


def test_a_shared_block_waits_for_all_that_share_it() -> None:
    cell = make_mixed_cell("native:2,int8", budget=64)
    cell.submit(make_request("young", range(16), max_tokens=12))
    run_until(cell, "young", 1)
    cell.submit(make_request("old", [*range(16), *range(50, 62)], max_tokens=6))
    run_until(cell, "old", 2)
    young, old = row_formats(cell)
    assert young[:5] == [NATIVE, INT8, NATIVE, NATIVE, NATIVE]
    assert old[:7] == [NATIVE, INT8, NATIVE, NATIVE, INT8, NATIVE, NATIVE]  # alone it would have four in int8
    run_until(cell, "young", 6)
    young, old = row_formats(cell)
    assert young[:3] == old[:3] == [NATIVE, INT8, INT8]
    cell.run_to_end()
    cell.check_texts()


def test_a_shared_block_is_narrowed_when_the_one_that_held_it_back_ends() -> None:
    cell = make_mixed_cell("native:2,int8", budget=64)
    cell.submit(make_request("young", range(16), max_tokens=30, floor=NATIVE))
    run_until(cell, "young", 1)
    cell.submit(make_request("old", [*range(16), *range(50, 62)], max_tokens=20))
    run_until(cell, "old", 2)
    assert row_formats(cell)[1][:6] == [NATIVE, NATIVE, NATIVE, NATIVE, INT8, NATIVE]
    cell.abort("young")
    plan(cell)
    cell.apply()
    assert row_formats(cell)[0][:6] == [NATIVE, INT8, INT8, INT8, INT8, NATIVE]
    cell.run_to_end()
    cell.check_texts()


def test_a_block_that_was_held_back_halfway_is_narrowed_further_when_that_one_ends() -> None:
    cell = make_mixed_cell("native:1,int8:2,int4", budget=128)
    cell.submit(make_request("first", range(8), max_tokens=1))
    cell.run_to_end()  # its second block is native in the cache
    cell.submit(make_request("free", [*range(8), *range(50, 74)], max_tokens=20))
    cell.submit(make_request("strict", [*range(8), *range(80, 104)], max_tokens=20, floor=INT8))
    plan(cell)
    plan_after_apply(cell)
    cell.apply()
    assert [row[1] for row in row_formats(cell)] == [INT8, INT8]
    cell.abort("strict")
    plan(cell)
    cell.apply()
    assert row_formats(cell)[0][1] is INT4
    cell.run_to_end()
    cell.check_texts()


def test_samples_share_narrowed_blocks() -> None:
    cell = make_mixed_cell("native:1,int8", budget=64)
    cell.submit(make_request("a", range(14), n=3, max_tokens=9))
    cell.run_to_end()
    assert cell.scheduler.counters.demoted_blocks >= 2
    cell.check_texts()


def test_samples_that_begin_beside_an_older_one_share_the_blocks_of_their_own_age() -> None:
    cell = make_mixed_cell("native:4,int8", budget=40)
    request = make_request("a", range(17), n=3, max_tokens=36)
    request.delivered[0] = Delivered(tuple(expected_of(request)[:30]))
    cell.submit(replace(request, is_resubmit=True))
    run_until(cell, "a", 1, sequence_idx=2)
    old, *young = row_formats(cell)
    assert old[1:5] == [INT8] * 4
    assert [row[:5] for row in young] == [[NATIVE] * 5] * 2
    cell.run_to_end()
    cell.check_texts()


def test_a_cached_block_is_a_hit_where_the_policy_allows_its_format() -> None:
    cell = make_mixed_cell("native:2,int8", budget=64)
    cell.submit(make_request("a", range(24), max_tokens=5))
    cell.run_to_end()  # 7 full blocks: native, 4 times int8, twice native
    cell.submit(make_request("long", [*range(24), *range(50, 58)], max_tokens=1))
    assert plan(cell).new_rows[0].num_computed_tokens == 24  # at that age all of them may be int8
    cell.run_to_end()
    cell.submit(make_request("short", [*range(16), *range(70, 74)], max_tokens=1))
    assert plan(cell).new_rows[0].num_computed_tokens == 12  # the fourth of five blocks should be native
    cell.run_to_end()
    cell.submit(make_request("strict", [*range(24), *range(50, 58)], max_tokens=1, floor=NATIVE))
    assert plan(cell).new_rows[0].num_computed_tokens == 4
    cell.run_to_end()
    cell.check_texts()


def test_one_hash_may_have_copies_in_several_formats_and_the_best_is_read() -> None:
    cell = make_mixed_cell("native:1,int8:2,int4", budget=64)
    cell.submit(make_request("a", range(24), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("strict", [*range(20), 60], max_tokens=1, floor=NATIVE))
    cell.run_to_end()  # computes native copies of what is int8 and int4 in the cache
    cell.submit(make_request("b", [*range(20), *range(80, 90)], max_tokens=2))
    first = plan(cell)
    assert formats(list(first.new_rows[0].entries))[:5] == [NATIVE] * 5
    second = plan(cell)
    assert {format_of(source) for source, _ in second.ops.requantize} == {NATIVE}
    cell.run_to_end()
    cell.check_texts()


def test_a_sequence_that_starts_over_accepts_what_its_floor_allows() -> None:
    cell = make_mixed_cell("native:4,int8", budget=64)
    cell.submit(make_request("a", range(24), max_tokens=18))
    cell.run_to_end()  # 10 full blocks, of which 5 are int8
    text = cell.output("a")
    for name, num_delivered, floor, num_hits in (("new", 0, None, 2), ("again", 3, None, 6), ("strict", 3, NATIVE, 1)):
        delivered = {0: Delivered(text[:num_delivered])} if num_delivered else {}
        request = make_request(name, range(24), max_tokens=4, floor=floor, delivered=delivered)
        cell.submit(request)
        assert plan(cell).new_rows[0].num_computed_tokens == num_hits * 4
        cell.abort(name)
        cell.run_to_end()


def test_what_a_failed_step_was_to_narrow_is_no_hit() -> None:
    cell = make_mixed_cell("native:1,int8", budget=64)
    cell.submit(make_request("a", range(24), max_tokens=12))
    plan(cell)
    assert plan(cell).ops.requantize
    cell.apply()
    cell.apply(fails=True)
    again = plan(cell)
    assert again.restart
    # Only the first, the fifth and the sixth block were never to move; from the second on all is computed anew.
    assert again.new_rows[0].num_computed_tokens == 4
    cell.run_to_end()
    cell.check_texts()


def test_blocks_of_all_formats_are_taken_over_from_a_worker() -> None:
    cell = make_mixed_cell("native:1,int8", budget=64)
    cell.submit(make_request("a", range(20), max_tokens=9))
    plan(cell)
    plan(cell)
    cell.apply()
    seals = list(plan(cell).seals)
    cell.apply()
    seals += plan(cell).seals
    restarted = make_cell(num_lanes=0, precision=parse_policy("native:1,int8"))
    restarted.add_lane("w0", make_mixed_spec(budget=64))
    restarted.workers[LaneId("w0")].take_arena(cell.workers[LaneId("w0")])
    restarted.scheduler.restore(LaneId("w0"), seals)
    restarted.submit(make_request("b", [*range(20), *range(30, 36)], max_tokens=5))
    row = plan(restarted).new_rows[0]
    assert formats(list(row.entries))[:5] == [NATIVE, INT8, INT8, INT8, NATIVE]
    restarted.run_to_end()
    restarted.check_texts()


def test_a_lane_without_a_format_of_the_policy_is_refused() -> None:
    with pytest.raises(PrecisionError, match="no int8 KV blocks"):
        make_kv_manager(make_spec(), parse_policy("native:1,int8"), 16, enable_prefix_caching=True)


def test_a_pool_of_a_few_slabs_stays_native() -> None:
    cell = make_mixed_cell("native:1,int8", num_slabs=5)
    cell.submit(make_request("a", range(16), max_tokens=8))
    cell.run_to_end()
    assert cell.scheduler.counters.demoted_blocks == 0
    cell.check_texts()
