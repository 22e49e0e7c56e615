"""What a step's result changes: blocks are sealed, tokens appended, sequences ended or, after a failure, begun anew."""

from scheduler_svc.core.beams import take_top
from scheduler_svc.core.ends import end
from scheduler_svc.core.lane import Lane, PlannedStep
from scheduler_svc.core.losses import fail_row, fail_step
from scheduler_svc.core.publication import publish_sealed
from scheduler_svc.core.state import State
from scheduler_svc.core.types import FailedRow, SampledRows, StepResult, StepStatus, TokenRun, TopLogprobs


def apply_result(state: State, lane: Lane, result: StepResult) -> list[TokenRun]:
    """Take the result of the lane's oldest step in flight. What belongs to an older seq_epoch is ignored."""
    step = lane.end_step()
    assert step.step_id == result.step_id, f"step {result.step_id} answered, step {step.step_id} expected"
    runs = []
    if result.status is StepStatus.OK:
        for failed in result.failed_rows:
            runs += fail_row(state, lane, failed)
        _seal(state, lane, step)
        lane.kv.end_step(step.step_id, step.relocations)
        runs += _take_tokens(state, lane, result.sampled)
    elif result.status is StepStatus.FAILED:
        runs = fail_step(state, lane, step, result.error)
    lane.kv.pool.end_quarantine(step.step_id)
    publish_sealed(state, lane)
    return runs


def _seal(state: State, lane: Lane, step: PlannedStep) -> None:
    """Seal the blocks that a step filled; settled rows fill none.

    Before the step's tokens are taken: all tokens it wrote are known.
    """
    if not state.config.enable_prefix_caching:
        return
    block_size = lane.kv.block_size
    for seq, seq_epoch, _, _, num_computed_tokens in step.rows:
        if num_computed_tokens >= (seq.num_sealed_blocks + 1) * block_size and seq_epoch == seq.seq_epoch:
            lane.kv.commit(seq, num_computed_tokens)


def _take_tokens(state: State, lane: Lane, sampled: SampledRows) -> list[TokenRun]:
    """Append sampled tokens to their sequences; returns what is new of each."""
    runs: list[TokenRun] = []
    seqs, beams = state.seqs, lane.beams
    for seq_id, seq_epoch, token_ids, logprobs in sampled.rows():
        seq = seqs.get(seq_id)
        if seq is None or seq.seq_epoch != seq_epoch or seq.lane_id != lane.lane_id:
            continue
        if beams and seq_id in beams:
            top = logprobs[0] if logprobs else None
            if isinstance(top, TopLogprobs):
                runs += take_top(state, seq, top)
            else:
                runs += fail_row(state, lane, FailedRow(seq_id, seq_epoch, "its likeliest tokens are missing"))
            continue
        run = seq.take(token_ids, logprobs)
        if run.finish_reason is not None:
            run = run._replace(usage=end(state, seq, run.finish_reason).usage)
        runs.append(run)
    state.counters.output_tokens += sum([len(run.token_ids) for run in runs])
    return runs
