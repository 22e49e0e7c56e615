"""Blocks put in other places: what a step reads and writes, and what steps that fail or wait leave behind."""

import pytest

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import SlabArena, entry_of
from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.kv_manager import Relocation
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.mixed_kv import make_kv_manager
from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.relocation import Relocator
from scheduler_svc.core.types import BlockId, Format, LaneId, Seal, StepId
from tests.scheduler.core.helpers import make_cell, make_mixed_spec, make_request, plan

NATIVE, INT8, INT4 = Format.NATIVE, Format.INT8, Format.INT4
HASH = BlockHash(b"h" * 32)


def make_relocator() -> Relocator:
    pool = BlockPool(SlabArena(12, {NATIVE: 2, INT8: 3, INT4: 5}))
    return Relocator(pool, [], StepId(1))


def sealed(pool: BlockPool, fmt: Format) -> Block:
    block = pool.allocate(fmt)
    pool.seal(block, HASH)
    return block


def test_a_block_is_relocated_once_in_a_step() -> None:
    relocator = make_relocator()
    block = relocator.pool.allocate()
    assert relocator.relocate(block, INT8)
    assert relocator.relocate(block, INT4)
    assert [relocation.destination for relocation in relocator.relocations] == [block.entry]
    assert block.fmt is INT8


def test_a_narrower_block_is_made_from_the_best_copy_which_nobody_evicts_meanwhile() -> None:
    relocator = make_relocator()
    pool = relocator.pool
    narrow, wide = sealed(pool, INT8), sealed(pool, NATIVE)
    pool.release([wide], None)
    relocator.relocate(narrow, INT4)
    assert relocator.relocations == [Relocation(narrow, wide.entry, narrow.entry)]
    assert pool.num_cached == 0
    pool.end_quarantine(StepId(1))
    assert pool.num_cached == 1
    pool.check_integrity([[narrow]])


def test_a_copy_whose_place_is_still_to_be_written_is_not_read() -> None:
    relocator = make_relocator()
    wide, narrow = sealed(relocator.pool, NATIVE), sealed(relocator.pool, INT8)
    source = narrow.entry
    relocator.relocate(wide, INT8)
    relocator.relocate(narrow, INT4)
    assert relocator.relocations[1] == Relocation(narrow, source, narrow.entry)


def test_a_seal_follows_the_block_to_where_the_last_step_put_it() -> None:
    relocator = make_relocator()
    block = sealed(relocator.pool, NATIVE)
    relocator.relocate(block, INT8)
    first = relocator.relocations.copy()
    relocator.relocations.clear()
    relocator.step_id = StepId(2)
    relocator.relocate(block, INT4)
    assert list(relocator.end_step(StepId(1), first)) == []
    assert list(relocator.end_step(StepId(2), relocator.relocations)) == [block]


def test_places_given_up_while_a_step_with_relocations_is_planned_wait_for_it() -> None:
    kv = make_kv_manager(make_mixed_spec(), parse_policy("native:1,int8"), 16, enable_prefix_caching=True)
    lane = Lane(LaneId("w0"), kv, max_num_seqs=4, max_num_batched_tokens=16)
    assert lane.quarantine_end() is None
    block = kv.pool.allocate()
    kv.relocations.append(Relocation(block, block.entry, block.entry))
    assert lane.quarantine_end() == 1


def test_what_a_skipped_step_was_to_narrow_is_no_hit() -> None:
    cell = make_cell(make_mixed_spec(), precision=parse_policy("native:1,int8"))
    cell.submit(make_request("a", range(12), max_tokens=20))
    steps = cell.in_flight[LaneId("w0")]
    while len(cell.output("a")) < 3:
        plan(cell)
        cell.apply()
    while len(steps) < 2 or steps[0].ops.requantize or not steps[1].ops.requantize:
        if cell.plan() is None:
            cell.apply()
    cell.apply(fails=True)  # so that the worker skips the step that narrows a block sealed long ago
    cell.run_to_end()
    cell.check_texts()


def test_a_prompt_that_needs_a_slab_emptied_gets_it_though_no_step_is_in_flight() -> None:
    """A lane is planned again when a result comes: a plan that gives nothing while a row waits would be the last."""
    cell = make_cell(make_mixed_spec(8), precision=parse_policy("native:1,int8"))
    # Full native slabs, a block in each of four int8 ones, and the last slab, which native blocks leave to int8.
    native = [entry_of(BlockId(256 * slab + place), NATIVE) for slab in range(3) for place in range(2)]
    int8 = [entry_of(BlockId(256 * slab), INT8) for slab in range(3, 7)]
    seals = [Seal(entry, BlockHash(bytes([idx]) * 32)) for idx, entry in enumerate([*int8, *native])]
    cell.workers[LaneId("w0")].fill(seal.entry for seal in seals)
    cell.scheduler.restore(LaneId("w0"), seals)
    cell.submit(make_request("a", range(10), max_tokens=4))
    assert len(plan(cell).ops.copy) == 2
    cell.run_to_end()
    cell.check_texts()


@pytest.mark.parametrize("policy", ["native", "native:1,int8", "native:2,int8:2,int4"])
@pytest.mark.parametrize("num_slabs", [8, 10, 13])
def test_a_lane_with_rows_always_has_a_step_to_plan_when_none_is_in_flight(policy: str, num_slabs: int) -> None:
    cell = make_cell(make_mixed_spec(num_slabs, budget=40), precision=parse_policy(policy, "int4"))
    for number in range(3):
        cell.submit(make_request(f"r{number}", range(100 * number, 100 * number + 30), max_tokens=25, n=2))
    while cell.scheduler.request_ids():
        plan(cell)
        cell.apply()
    cell.check_texts()
