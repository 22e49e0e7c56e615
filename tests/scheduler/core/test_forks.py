"""Samples of one request share the KV of its prompt."""

from collections.abc import Sequence

import pytest

from protos.block_hash import BlockHash, next_hash
from scheduler_svc.core import sequence
from scheduler_svc.core.precision import NATIVE_ONLY, parse_policy
from scheduler_svc.core.types import Delivered, Entry, FinishReason, Format, LaneId, LaneSpec
from tests.scheduler.core.helpers import (
    entries,
    expected_of,
    make_cell,
    make_mixed_spec,
    make_request,
    make_spec,
    plan,
)


def test_samples_share_the_prompt_and_copy_its_tail() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(10), n=3, max_tokens=6))
    assert len(plan(cell).new_rows) == 1
    second = plan(cell)
    assert [row.entries for row in second.new_rows] == [entries(0, 1, 4), entries(0, 1, 5)]
    assert [row.num_computed_tokens for row in second.new_rows] == [9, 9]
    # The parent writes to the shared tail as well, so it gets a copy too.
    assert [(patch.block_idx, patch.entry) for patch in second.patches] == [(2, Entry(3 * 8))]
    assert sorted(second.ops.copy) == [(Entry(16), Entry(24)), (Entry(16), Entry(32)), (Entry(16), Entry(40))]
    cell.run_to_end()
    cell.check_texts()


def test_samples_do_not_share_a_block_of_which_they_use_nothing() -> None:
    cell = make_cell()
    cell.submit(make_request("a", range(9), n=2, max_tokens=6))
    plan(cell)
    second = plan(cell)
    assert second.new_rows[0].entries == entries(0, 1, 3)
    assert second.ops.copy == []
    cell.run_to_end()
    cell.check_texts()


def test_samples_take_over_the_hashes_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, hashed = make_cell(), []

    def count_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
        hashed.append(tuple(token_ids))
        return next_hash(parent, token_ids)

    monkeypatch.setattr(sequence, "next_hash", count_hash)
    cell.submit(make_request("a", range(41), n=3, max_tokens=2))
    cell.run_to_end()
    cell.check_texts()
    assert sorted(hashed) == [tuple(range(start, start + 4)) for start in range(0, 40, 4)]


def test_samples_beyond_the_rows_queue() -> None:
    cell = make_cell(make_spec(max_num_seqs=2))
    cell.submit(make_request("a", range(10), n=5, max_tokens=6))
    cell.run_to_end()
    cell.check_texts()


def test_the_leader_may_be_aborted_before_the_others_forked() -> None:
    cell = make_cell(make_spec(budget=4))
    cell.submit(make_request("a", range(10), n=3, max_tokens=6))
    plan(cell)
    cell.abort("a", 0)
    cell.run_to_end()
    cell.check_texts()
    assert cell.end("a", 1).finish_reason is FinishReason.LENGTH


def test_sample_does_not_write_on_in_a_prompts_tail_that_another_narrowed() -> None:
    cell = make_cell(make_mixed_spec(), precision=parse_policy("native:1,int8"))
    request = make_request("a", range(10), n=3, max_tokens=12)
    request.delivered[0] = Delivered(tuple(expected_of(request)[:8]))
    cell.submit(request)
    plan(cell)  # four blocks of the first sample's 18 tokens
    second = plan(cell)  # its last two; two blocks are narrowed, the one with the prompt's tail among them
    assert len(second.ops.requantize) == 2
    cell.run_to_end()
    cell.check_texts()


@pytest.mark.parametrize("policy", [None, "native:1,int8"])
@pytest.mark.parametrize("n", [8, 16])
def test_samples_hold_a_long_prompt_once_and_their_tails(n: int, policy: str | None) -> None:
    num_prompt_tokens, max_tokens, block_size = 1000, 20, 16
    quantized = {Format.INT8: 8} if policy else {}
    spec = LaneSpec(400, 4, block_size, 16, 256, 2000, quantized)
    cell = make_cell(spec, precision=parse_policy(policy) if policy else NATIVE_ONLY)
    cell.submit(make_request("a", range(num_prompt_tokens), n=n, max_tokens=max_tokens))
    most = 0
    while cell.plan() is not None or any(cell.in_flight.values()):
        cell.apply()
        stats = cell.scheduler.lane_stats(LaneId("w0"))
        most = max(most, sum(stats.num_referenced_blocks))
    cell.check_texts()
    num_shared = num_prompt_tokens // block_size
    num_tail_blocks = -(-(num_prompt_tokens + max_tokens) // block_size) - num_shared
    assert num_shared < most <= 1.1 * (num_shared + n * num_tail_blocks)
    assert most < 0.3 * n * (num_shared + num_tail_blocks)  # that is what n prompts would take
