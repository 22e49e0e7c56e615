"""A step from request to result, with a model that reads its context back through the block tables."""

import pytest
import torch

from kernels.formats import PLACES_PER_SLAB, Format, entry
from protos import worker_pb2 as pb
from tests.worker.fakes import (
    EOS,
    FakeCompute,
    continued,
    entries_of,
    entry_of,
    greedy_continuation,
    make_runner,
    new_row,
    next_token,
    sampling_params,
    seals,
    tokens_of,
)
from worker_svc.errors import DeviceFaultError
from worker_svc.step import StepRunner

PROMPT = [5, 9, 2, 44, 3]
HASH = b"h" * 32


def sealed_entries(runner: StepRunner) -> list[int]:
    return [sealed for part in runner.fence() for sealed in part.seals.entries]


def test_rows_join_decode_and_leave() -> None:
    runner = make_runner()
    longer = [7] * 11
    result = runner.run(pb.StepRequest(step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    assert result.status == pb.STEP_STATUS_OK
    outputs = {1: [tokens_of(result)[1]], 2: []}
    result = runner.run(
        pb.StepRequest(step_id=2, new_rows=[new_row(2, longer, entries_of(3, 1))], continued=continued(1))
    )
    for _ in range(2):
        for seq_id, token_id in tokens_of(result).items():
            outputs[seq_id].append(token_id)
        result = runner.run(pb.StepRequest(continued=continued(2, 1)))
    assert outputs[1] == greedy_continuation(PROMPT, 3)
    assert outputs[2] == greedy_continuation(longer, 2)
    result = runner.run(pb.StepRequest(finished_seq_ids=[1], continued=continued(2)))
    assert list(tokens_of(result)) == [2]


def test_chunked_prompt_samples_with_its_last_chunk() -> None:
    runner = make_runner()
    prompt = list(range(2, 22))
    result = runner.run(pb.StepRequest(new_rows=[new_row(1, prompt, entries_of(2), num_scheduled=8)]))
    assert not result.HasField("sampled")
    more = pb.ContinuedRows(seq_ids=[1], num_scheduled_tokens=[12], num_new_entries=[2], new_entries=entries_of(0, 1))
    assert tokens_of(runner.run(pb.StepRequest(continued=more))) == {1: next_token(prompt)}


def test_cached_prefix_is_read_from_the_blocks_of_another_row() -> None:
    runner = make_runner()
    prompt = list(range(30, 38))
    runner.run(pb.StepRequest(new_rows=[new_row(1, prompt, entries_of(4))]))
    shared = new_row(2, [*prompt, 3], entries_of(4, 5), num_computed=8)
    assert tokens_of(runner.run(pb.StepRequest(new_rows=[shared]))) == {2: next_token([*prompt, 3])}


def test_fork_copies_its_tail_before_it_writes() -> None:
    runner = make_runner()
    first = tokens_of(runner.run(pb.StepRequest(new_rows=[new_row(1, PROMPT, entries_of(0))])))[1]
    child = new_row(2, [*PROMPT, 60], entries_of(1), num_computed=5, num_prompt_tokens=5)
    ops = pb.BlockOps(copy_src_entries=entries_of(0), copy_dst_entries=entries_of(1))
    result = runner.run(pb.StepRequest(new_rows=[child], continued=continued(1), ops=ops))
    assert tokens_of(result) == {1: next_token([*PROMPT, first]), 2: next_token([*PROMPT, 60])}


def test_step_of_block_operations_alone_runs_no_forward() -> None:
    compute = FakeCompute()
    result = make_runner(compute).run(pb.StepRequest(step_id=4, ops=pb.BlockOps(zero_entries=entries_of(3))))
    assert result.status == pb.STEP_STATUS_OK
    assert compute.num_forwards == 0
    assert compute.slots[3 * 8] == 0


def test_step_that_samples_nothing_waits_for_the_device() -> None:
    compute = FakeCompute()
    runner = make_runner(compute)
    runner.run(pb.StepRequest(new_rows=[new_row(1, PROMPT, entries_of(0), num_scheduled=3)]))
    assert compute.num_waits == 1
    rest = pb.ContinuedRows(seq_ids=[1], num_scheduled_tokens=[2])
    assert tokens_of(runner.run(pb.StepRequest(continued=rest)))
    assert compute.num_waits == 1  # the tokens came back: nothing is left to wait for
    runner.run(pb.StepRequest(ops=pb.BlockOps(zero_entries=entries_of(3))))
    assert compute.num_waits == 2


def test_row_with_bad_logits_fails_alone_and_is_skipped_until_sent_anew() -> None:
    compute = FakeCompute(poisoned_token=44)
    runner = make_runner(compute)
    rows = [new_row(1, PROMPT, entries_of(0)), new_row(2, [3, 44], entries_of(1), seq_epoch=6)]
    result = runner.run(pb.StepRequest(new_rows=rows))
    assert tokens_of(result) == {1: next_token(PROMPT)}
    assert [(row.seq_id, row.seq_epoch) for row in result.failed_rows] == [(2, 6)]
    assert "not finite" in result.failed_rows[0].error
    result = runner.run(pb.StepRequest(continued=continued(1, 2)))
    assert list(tokens_of(result)) == [1]
    assert not result.failed_rows


def test_after_a_failed_step_steps_are_skipped_until_a_restart() -> None:
    compute = FakeCompute(fail_next=RuntimeError("no\nmemory"))
    runner = make_runner(compute)
    result = runner.run(pb.StepRequest(lane_epoch=3, step_id=1, new_rows=[new_row(1, PROMPT, entries_of(0))]))
    assert (result.status, result.error) == (pb.STEP_STATUS_FAILED, "RuntimeError: no memory")
    assert (result.lane_epoch, result.step_id) == (3, 1)
    result = runner.run(pb.StepRequest(step_id=2, continued=continued(1), seals=seals((entry_of(9), HASH))))
    assert result.status == pb.STEP_STATUS_SKIPPED
    assert compute.num_forwards == 1
    result = runner.run(pb.StepRequest(step_id=3, restart=True, new_rows=[new_row(2, PROMPT, entries_of(0))]))
    assert tokens_of(result) == {2: next_token(PROMPT)}
    # The restart began without rows, and the seal of the skipped step counts.
    assert runner.run(pb.StepRequest(continued=continued(1))).status == pb.STEP_STATUS_FAILED
    assert sealed_entries(runner) == [entry_of(9)]


def test_malformed_step_fails_as_a_whole() -> None:
    result = make_runner().run(pb.StepRequest(step_id=1, continued=continued(8)))
    assert result.status == pb.STEP_STATUS_FAILED
    assert "sequence 8" in result.error


def test_step_of_operations_alone_narrows_a_block_of_a_row_that_sits_out() -> None:
    compute = FakeCompute()
    runner = make_runner(compute)
    prompt = [*range(20, 30)]
    runner.run(pb.StepRequest(new_rows=[new_row(1, prompt, entries_of(0, 1))]))
    narrowed = entry(5 * PLACES_PER_SLAB, Format.INT8)
    ops = pb.BlockOps(requantize_src_entries=entries_of(0), requantize_dst_entries=[narrowed])
    patches = pb.EntryPatches(seq_ids=[1], block_idxs=[0], entries=[narrowed])
    result = runner.run(pb.StepRequest(patches=patches, ops=ops))
    assert (result.status, compute.num_waits) == (pb.STEP_STATUS_OK, 1)
    compute.zero_blocks(entries_of(0))
    assert tokens_of(runner.run(pb.StepRequest(continued=continued(1)))) == {1: greedy_continuation(prompt, 2)[1]}


def test_place_that_is_narrowed_into_loses_the_seals_of_its_slab() -> None:
    runner = make_runner()
    runner.run(pb.StepRequest(seals=seals(*((entry_of(idx), HASH) for idx in (0, 1, 4)))))
    ops = pb.BlockOps(requantize_src_entries=entries_of(4), requantize_dst_entries=[entry(2, Format.INT8)])
    runner.run(pb.StepRequest(ops=ops))
    assert sealed_entries(runner) == entries_of(4)


@pytest.mark.parametrize(
    "ops",
    [
        pb.BlockOps(requantize_src_entries=entries_of(1), requantize_dst_entries=entries_of(2)),
        pb.BlockOps(requantize_src_entries=[9], requantize_dst_entries=entries_of(2)),
        pb.BlockOps(requantize_src_entries=entries_of(1)),
        pb.BlockOps(copy_src_entries=entries_of(1), copy_dst_entries=[entry(256, Format.INT8)]),
        pb.BlockOps(copy_src_entries=entries_of(1)),
    ],
)
def test_senseless_operation_is_refused(ops: pb.BlockOps) -> None:
    result = make_runner().run(pb.StepRequest(ops=ops))
    assert result.status == pb.STEP_STATUS_FAILED
    assert "MalformedStepError" in result.error


def test_operation_outside_the_arena_is_refused() -> None:
    result = make_runner().run(pb.StepRequest(ops=pb.BlockOps(zero_entries=[1 << 25])))
    assert "no place" in result.error


def test_fault_of_the_device_ends_the_process() -> None:
    runner = make_runner(FakeCompute(fail_next=torch.AcceleratorError("illegal memory access")))
    with pytest.raises(DeviceFaultError, match="step 5"):
        runner.run(pb.StepRequest(step_id=5, new_rows=[new_row(1, PROMPT, entries_of(0))]))


def test_seals_are_voided_by_operations_and_by_the_forwards_writes() -> None:
    runner = make_runner()
    runner.run(pb.StepRequest(seals=seals(*((entry_of(idx), HASH) for idx in range(6)))))
    ops = pb.BlockOps(zero_entries=entries_of(1), copy_src_entries=entries_of(2), copy_dst_entries=entries_of(3))
    cached_then_written = new_row(1, [4] * 10, entries_of(0, 4), num_computed=8)
    runner.run(pb.StepRequest(new_rows=[cached_then_written], ops=ops))
    assert sealed_entries(runner) == entries_of(0, 2, 5)


def test_fence_forgets_rows_and_keeps_seals() -> None:
    runner = make_runner()
    runner.run(pb.StepRequest(new_rows=[new_row(1, PROMPT, entries_of(0))]))
    runner.run(pb.StepRequest(seals=seals((entry_of(7), HASH))))
    assert sealed_entries(runner) == [entry_of(7)]
    assert runner.run(pb.StepRequest(continued=continued(1))).status == pb.STEP_STATUS_FAILED


def test_stop_tokens_wait_for_min_tokens() -> None:
    def sampled(**changes: object) -> list[int]:
        runner = make_runner()
        # Bias makes the end-of-sequence token by far the likeliest.
        params = sampling_params(logit_bias_token_ids=[EOS], logit_bias_values=[50.0], **changes)
        result = runner.run(pb.StepRequest(new_rows=[new_row(1, PROMPT, entries_of(0), sampling=params)]))
        later = [runner.run(pb.StepRequest(continued=continued(1))) for _ in range(2)]
        return [tokens_of(step)[1] for step in (result, *later)]

    assert sampled() == [EOS, EOS, EOS]
    held_back = sampled(min_tokens=2)
    assert held_back[:2] == greedy_continuation(PROMPT, 2)
    assert held_back[2] == EOS
    assert sampled(min_tokens=2, ignore_eos=True) == [EOS, EOS, EOS]
    assert EOS not in sampled(min_tokens=2, ignore_eos=True, stop_token_ids=[EOS])[:2]


def test_log_probabilities_are_sent_where_asked_for() -> None:
    rows = [
        new_row(1, PROMPT, entries_of(0), sampling=sampling_params(num_logprobs=2)),
        new_row(2, PROMPT, entries_of(1), sampling=sampling_params(num_logprobs=0)),
        new_row(3, PROMPT, entries_of(2)),
    ]
    sampled = make_runner().run(pb.StepRequest(new_rows=rows)).sampled
    assert len(sampled.logprobs) == 3
    assert sampled.logprobs[0] == sampled.logprobs[1] < 0
    assert [row.seq_id for row in sampled.row_logprobs] == [1]
    tokens = sampled.row_logprobs[0].tokens[0]
    assert tokens.top_token_ids[0] == next_token(PROMPT)
    assert tokens.top_token_ids[1] == (1 if next_token(PROMPT) == 0 else 0)  # all others are equal: the lowest id
    assert tokens.top_logprobs[0] == tokens.logprob == sampled.logprobs[0]
    assert not make_runner().run(pb.StepRequest(new_rows=rows[2:])).sampled.logprobs
