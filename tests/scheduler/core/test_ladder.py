"""Room runs short where blocks can be narrowed: evict, narrow beyond the policy, move, and only then preempt."""

from scheduler_svc.core.arena import format_of
from scheduler_svc.core.precision import parse_policy
from scheduler_svc.core.types import ErrorCode, FinishReason, Format, LaneId
from tests.scheduler.core.helpers import Cell, make_cell, make_mixed_spec, make_request, plan

NATIVE, INT8, INT4 = Format.NATIVE, Format.INT8, Format.INT4


def make_pressed_cell(policy: str, floor: str | None, *, num_slabs: int = 16, budget: int = 32) -> Cell:
    return make_cell(make_mixed_spec(num_slabs, budget=budget), precision=parse_policy(policy, floor))


def row_formats(cell: Cell) -> list[list[Format]]:
    """Return the formats in each row's table, as the worker has it."""
    return [[format_of(entry) for entry in row.entries] for row in cell.workers[LaneId("w0")].rows.values()]


def run_and_watch(cell: Cell) -> list[list[list[Format]]]:
    """Run to the end; return the rows' formats after each step."""
    seen: list[list[list[Format]]] = []
    while cell.scheduler.request_ids():
        cell.plan()
        cell.plan()
        cell.apply()
        seen.append(row_formats(cell))
    cell.run_to_end()
    cell.check_texts()
    return seen


def test_cached_blocks_go_before_any_block_is_narrowed() -> None:
    cell = make_pressed_cell("native", "int8")
    cell.submit(make_request("a", range(60), max_tokens=4))
    cell.run_to_end()
    cell.submit(make_request("b", range(100, 160), max_tokens=30))
    cell.run_to_end()
    counters = cell.scheduler.counters
    assert counters.evicted_blocks > 0
    assert (counters.pressed_blocks, counters.preemptions) == (0, 0)


def test_the_oldest_blocks_are_narrowed_beyond_the_policy_and_nobody_is_preempted() -> None:
    cell = make_pressed_cell("native", "int4")
    cell.submit(make_request("a", range(8), max_tokens=72))
    cell.submit(make_request("b", range(100, 108), max_tokens=72))
    seen = run_and_watch(cell)
    counters = cell.scheduler.counters
    assert counters.pressed_blocks > 0
    assert counters.preemptions == 0
    for formats in (formats for rows in seen for formats in rows if INT4 in formats):
        last = max(idx for idx, fmt in enumerate(formats) if fmt is INT4)
        assert formats[: last + 1] == [NATIVE, *[INT4] * last], "a younger block was narrowed before an older one"


def test_without_a_narrower_floor_the_newest_row_is_preempted() -> None:
    cell = make_cell(make_mixed_spec(16, budget=32), precision=parse_policy("native"))
    cell.submit(make_request("a", range(8), max_tokens=72))
    cell.submit(make_request("b", range(100, 108), max_tokens=72))
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions > 0
    cell.check_texts()


def test_a_request_keeps_its_floor_under_pressure() -> None:
    cell = make_pressed_cell("native", "int4", num_slabs=20)
    cell.submit(make_request("strict", range(8), max_tokens=100, floor=NATIVE))
    cell.submit(make_request("free", range(100, 108), max_tokens=100))
    seen = run_and_watch(cell)
    rows = [formats for rows in seen for formats in rows]
    assert any(INT4 in formats for formats in rows)
    assert cell.end("strict").finish_reason is FinishReason.LENGTH
    assert all(sum(INT4 in formats for formats in rows) <= 1 for rows in seen)


def test_blocks_that_another_request_kept_wide_are_narrowed_once_it_has_ended() -> None:
    cell = make_pressed_cell("native", "int4", num_slabs=20, budget=64)
    prefix = range(40)
    cell.submit(make_request("first", prefix, max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("strict", [*prefix, 50], max_tokens=60, floor=NATIVE))
    cell.submit(make_request("free", [*prefix, 60], max_tokens=300))
    seen = run_and_watch(cell)
    assert any(len(rows) == 2 and INT4 in formats and formats[1] is NATIVE for rows in seen for formats in rows)
    assert cell.end("free").finish_reason is FinishReason.LENGTH
    assert cell.scheduler.counters.preemptions == 0


def test_blocks_that_another_request_kept_from_the_narrowest_format_are_narrowed_once_it_has_ended() -> None:
    cell = make_pressed_cell("native:200,int8", "int4", num_slabs=20, budget=64)
    prefix = range(40)
    cell.submit(make_request("first", prefix, max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("free", [*prefix, 60], max_tokens=270))
    cell.submit(make_request("strict", [*prefix, 50], max_tokens=90, floor=INT8))
    seen = run_and_watch(cell)
    shared = [{fmt for formats in rows for fmt in formats[1:10]} for rows in seen if len(rows) == 2]
    assert {INT8} in shared
    assert any(set(rows[0][1:10]) == {INT4} for rows in seen if len(rows) == 1)
    assert cell.end("free").finish_reason is FinishReason.LENGTH


def test_when_all_is_at_the_floor_the_newest_row_is_preempted() -> None:
    cell = make_pressed_cell("native:1,int8", None, num_slabs=16)
    for number in range(6):
        cell.submit(make_request(f"r{number}", range(100 * number, 100 * number + 8), max_tokens=60))
    cell.run_to_end()
    assert cell.scheduler.counters.preemptions > 0
    cell.check_texts()


def test_slabs_are_emptied_by_moves_for_the_format_that_needs_them() -> None:
    cell = make_pressed_cell("native:1,int8:2,int4", None)
    for number in range(5):
        cell.submit(make_request(f"r{number}", range(100 * number, 100 * number + 20), max_tokens=30 + 4 * number))
    cell.run_to_end()
    assert cell.scheduler.counters.moved_blocks > 0
    assert cell.workers[LaneId("w0")].num_copies >= cell.scheduler.counters.moved_blocks
    cell.check_texts()


def test_a_sequence_longer_than_the_native_pool_is_served_when_narrower() -> None:
    cell = make_pressed_cell("native:1,int4", None)
    cell.submit(make_request("a", range(150), max_tokens=20))  # 43 blocks; the pool has 32 native ones
    cell.run_to_end()
    assert cell.end("a").finish_reason is FinishReason.LENGTH
    cell.check_texts()


def test_a_lone_sequence_that_outgrows_all_slabs_ends_with_an_error() -> None:
    cell = make_pressed_cell("native:1,int8", None)
    cell.submit(make_request("a", range(8), max_tokens=400))
    cell.run_to_end()
    end = cell.end("a")
    assert end.finish_reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.code is ErrorCode.INVALID_ARGUMENT
    assert len(cell.output("a")) > 32 * 4  # more than the native pool holds


def test_a_step_may_hold_block_operations_only() -> None:
    cell = make_pressed_cell("native:1,int4", None, budget=200)
    cell.submit(make_request("a", range(150), max_tokens=2))
    assert plan(cell).new_rows[0].num_scheduled_tokens == 120  # in all native places but those of the last slab
    second = plan(cell)
    assert second.continued_rows == []
    assert len(second.ops.requantize) == 5  # as many as that slab holds
    cell.apply()
    assert cell.plan() is None  # the places come back with the second step
    cell.apply()
    assert plan(cell).continued_rows[0].num_scheduled_tokens > 0
    cell.run_to_end()
    cell.check_texts()


def test_prompts_that_fit_in_the_policys_formats_are_admitted_together() -> None:
    running = []
    for policy in ("native", "native:1,int4"):
        cell = make_cell(make_mixed_spec(60, max_num_seqs=16), precision=parse_policy(policy))
        for number in range(12):
            cell.submit(make_request(f"r{number}", range(1000 * number, 1000 * number + 80), max_tokens=90))
        most = 0
        while cell.scheduler.request_ids():
            cell.plan()
            cell.plan()
            most = max(most, cell.scheduler.num_running_seqs)
            cell.apply()
        cell.check_texts()
        running.append(most)
    assert running[1] > running[0]
