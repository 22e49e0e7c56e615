"""What is cached, and who starts behind it."""

from scheduler_svc.core.types import LaneId
from tests.scheduler.core.helpers import entries, make_cell, make_request, make_spec, plan


def test_a_second_prompt_starts_behind_the_cached_prefix() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", [*range(8), 40, 41], max_tokens=1))
    row = plan(cell).new_rows[0]
    assert (row.num_computed_tokens, row.entries) == (8, entries(0, 1, 3))
    cell.run_to_end()
    usage = cell.end("b").usage
    assert usage is not None
    assert usage.num_cached_tokens == 8
    assert cell.scheduler.counters.prefix_cache_queries == 20
    assert cell.scheduler.counters.prefix_cache_hits == 8


def test_a_fully_cached_prompt_computes_its_last_block_anew() -> None:
    cell = make_cell()
    for name in "ab":
        cell.submit(make_request(name, range(8), max_tokens=3))
        cell.run_to_end()
    usage = cell.end("b").usage
    assert usage is not None
    assert usage.num_cached_tokens == 4
    cell.check_texts()


def test_generated_tokens_are_cached_too() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(4), max_tokens=9))
    cell.run_to_end()
    cell.submit(make_request("b", [*range(4), *cell.output("a"), 1, 2], max_tokens=1))
    assert plan(cell).new_rows[0].num_computed_tokens == 12


def test_nothing_is_published_before_its_step_was_applied() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(9), max_tokens=4))
    assert plan(cell).seals == []
    assert plan(cell).seals == []
    cell.apply()
    assert [seal.entry for seal in plan(cell).seals] == entries(0, 1)


def test_other_salts_share_nothing() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", range(10), max_tokens=1, salt="other"))
    assert plan(cell).new_rows[0].num_computed_tokens == 0


def test_a_request_may_refuse_the_cache() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), max_tokens=1))
    cell.run_to_end()
    cell.submit(make_request("b", range(10), max_tokens=1, skip_cache_read=True))
    assert plan(cell).new_rows[0].num_computed_tokens == 0


def test_a_prefix_being_computed_is_waited_for() -> None:
    cell = make_cell(make_spec(budget=100))
    cell.submit(make_request("a", range(20), max_tokens=4))
    cell.submit(make_request("b", [*range(16), 40], max_tokens=4))
    assert len(plan(cell).new_rows) == 1
    cell.apply()
    assert plan(cell).new_rows[0].num_computed_tokens == 16
    cell.run_to_end()
    cell.check_texts()


def test_restored_blocks_are_hits() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(12), max_tokens=2))
    cell.plan()
    cell.apply()
    seals = plan(cell).seals
    restarted = make_cell(num_lanes=0)
    restarted.add_lane("w0", make_spec())
    restarted.workers[LaneId("w0")].take_arena(cell.workers[LaneId("w0")])
    restarted.scheduler.restore(LaneId("w0"), seals)
    restarted.submit(make_request("b", range(12), max_tokens=5))
    assert plan(restarted).new_rows[0].num_computed_tokens == 8
    restarted.run_to_end()
    restarted.check_texts()
