"""How sequences end: by their own rules, by the client's wish, or because time or room ran out."""

from collections.abc import Sequence

from scheduler_svc.core.fairness import stop
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.state import State
from scheduler_svc.core.types import ErrorCode, FinishReason, RequestId, SchedulerError, TokenRun

MAX_HOMELESS_MS = 60_000  # a worker as large as the one that was lost may come back


def end(state: State, seq: Seq, reason: FinishReason, error: SchedulerError | None = None) -> TokenRun:
    """End a sequence in whatever state it is; returns its terminal run."""
    retire(state, seq)
    return seq.ended_run(reason, error)


def end_whole(state: State, seq: Seq, reason: FinishReason, error: SchedulerError | None = None) -> list[TokenRun]:
    """End a sequence, and with a beam all of its search; returns the terminal runs that are still owed."""
    if seq.job.search is None:
        return [end(state, seq, reason, error)]
    seqs = leader_last(seq.job.seqs)
    owed = [seq for seq in seqs if seq.end is None]
    for beam in seqs:
        retire(state, beam)
    return [seq.ended_run(reason, error) for seq in owed]


def retire(state: State, seq: Seq) -> None:
    """Take a sequence out of everything; it gives back all that it holds."""
    job = seq.job
    if seq.state is SeqState.RUNNING:
        stop(seq)
        if seq.lane_id in state.lanes:
            state.lanes[seq.lane_id].remove(seq)
    elif seq.state is SeqState.WAITING:
        state.queue.remove(seq)
    elif seq.state is SeqState.UNFORKED:
        if job.keeps_rows:
            stop(seq)
        job.unforked.remove(seq)
    if seq.worker_lane_id is not None and seq.worker_lane_id in state.lanes:
        state.lanes[seq.worker_lane_id].forget_row(seq)
    is_leader = seq.state is not SeqState.UNFORKED and not seq.num_output_tokens
    seq.state = SeqState.FINISHED
    if is_leader and job.unforked:
        leader = job.unforked.pop(0)
        leader.num_losses = seq.num_losses  # what it will compute was in flight at them
        state.wait(leader)
    del state.seqs[seq.seq_id]
    job.tenant.num_seqs -= 1
    job.num_unfinished -= 1
    if not job.num_unfinished:
        state.jobs.pop(job.request.request_id, None)
        # They name each other: else only a full garbage collection would free their tokens.
        job.seqs, job.beams = [], []


def abort(state: State, request_id: RequestId, sequence_idx: int | None) -> list[TokenRun]:
    """End a request's sequences, or one of them. Idempotent, in every state."""
    job = state.jobs.get(request_id)
    if job is None:
        return []
    if job.search is not None:
        return _abort_search(state, job, sequence_idx)
    seqs = [seq for seq in job.seqs if seq.state is not SeqState.FINISHED]
    if sequence_idx is not None:
        seqs = [seq for seq in seqs if seq.sequence_idx == sequence_idx]
    return [end(state, seq, FinishReason.ABORT) for seq in leader_last(seqs)]


def _abort_search(state: State, job: Job, sequence_idx: int | None) -> list[TokenRun]:
    """End a beam search, or one of its answers: its beams go on until nobody wants any."""
    owed = [seq for seq in job.seqs if seq.end is None]
    aborted = [seq for seq in owed if sequence_idx in (None, seq.sequence_idx)]
    if len(aborted) == len(owed):
        return end_whole(state, job.seqs[0], FinishReason.ABORT)
    return [seq.ended_run(FinishReason.ABORT, None) for seq in aborted]


def leader_last(seqs: Sequence[Seq]) -> list[Seq]:
    """Return sequences of one request in an order to end them: else each unforked one would be the leader in turn."""
    return sorted(seqs, key=lambda seq: seq.state is not SeqState.UNFORKED)


def expire(state: State, now_ms: int) -> list[TokenRun]:
    """End the requests whose deadline has passed, and those that no lane has been able to hold for a minute.

    Idle tenants are forgotten.
    """
    state.queue.forget_idle()
    return _end_late(state, now_ms) + _end_homeless(state, now_ms)


def _end_late(state: State, now_ms: int) -> list[TokenRun]:
    late = [j for j in state.jobs.values() if j.request.deadline_ms is not None and j.request.deadline_ms <= now_ms]
    error = SchedulerError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed before it was done")
    runs = []
    for job in late:
        for seq in leader_last(job.seqs):
            if seq.state is not SeqState.FINISHED:
                runs += end_whole(state, seq, FinishReason.ERROR, error)
    return runs


def _end_homeless(state: State, now_ms: int) -> list[TokenRun]:
    runs = []
    for seq in state.queue:
        if not state.lanes or any(lane.could_serve(seq) for lane in state.lanes.values()):
            seq.homeless_since_ms = None
        elif seq.homeless_since_ms is None:
            seq.homeless_since_ms = now_ms
        elif now_ms - seq.homeless_since_ms >= MAX_HOMELESS_MS:
            runs += end_outgrown(state, seq)
    return runs


def end_outgrown(state: State, seq: Seq) -> list[TokenRun]:
    """End a sequence for which there is no room, even when it has a lane for itself; and those of the same prompt."""
    message = f"the KV cache is too small for a sequence of more than {len(seq.token_ids) - 1} tokens"
    param = "max_tokens" if seq.num_output_tokens else "prompt"
    error = SchedulerError(ErrorCode.INVALID_ARGUMENT, message, param)
    # Each would be the leader in turn, and wait as long.
    unforked = () if seq.num_output_tokens or seq.job.search is not None else tuple(seq.job.unforked)
    return [run for lost in (*unforked, seq) for run in end_whole(state, lost, FinishReason.ERROR, error)]
