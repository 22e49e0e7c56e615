"""How requests come in: what can never be served is refused, the rest becomes a job of one sequence for each sample."""

from scheduler_svc.core.ends import end
from scheduler_svc.core.fairness import spare
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.state import State
from scheduler_svc.core.types import (
    Delivered,
    ErrorCode,
    FinishReason,
    LaneSpec,
    Request,
    SchedulerError,
    SeqId,
    TokenRun,
)

_RESUBMITTED = -(2**40)  # what was let in before a restart goes before all that is new


def submit(state: State, request: Request) -> list[TokenRun]:
    """Queue a request, or attach to one that is known; returns what the client has not got of it yet.

    Raises SchedulerError when the request can never be served or the queue is full.
    """
    job = state.jobs.get(request.request_id)
    if job is not None:
        return [run for seq in job.seqs for run in seq.replay(request.delivered.get(seq.sequence_idx))]
    if not request.is_resubmit:
        _check_queue(state, request)
    _check_servable(state, len(request.prompt_token_ids))
    arrival = next(state.arrivals) + (_RESUBMITTED if request.is_resubmit else 0)
    job = Job(request, arrival, state.queue.tenant(request.tenant))
    runs = _add_seqs(state, job)
    if job.num_unfinished:
        state.jobs[request.request_id] = job
    return runs


def learn_limits(state: State, spec: LaneSpec, max_seq_tokens: int) -> list[TokenRun]:
    """Note what a new lane can serve, and end what was queued before that was known and exceeds it; clamp the rest."""
    max_model_len = state.max_model_len = max(state.max_model_len or 0, spec.max_model_len)
    state.max_seq_tokens = max(state.max_seq_tokens or 0, max_seq_tokens)
    runs = []
    for seq in tuple(state.seqs.values()):
        seq.total_limit_tokens = min(seq.num_prompt_tokens + seq.ending.max_tokens, max_model_len)
        try:
            _check_servable(state, seq.num_prompt_tokens)
        except SchedulerError as error:
            runs.append(end(state, seq, FinishReason.ERROR, error))
    return runs


def _check_queue(state: State, request: Request) -> None:
    """Raise SchedulerError when too many sequences wait: of the tenant, or of all, which keep twice that room.

    So whoever fills the queue takes no place from the others.
    """
    most = state.config.max_queued_seqs
    num_waiting = state.queue.num_waiting_seqs_of(request.tenant)
    if num_waiting + request.n > most or (num_waiting := state.num_waiting_seqs) + request.n > 2 * most:
        raise SchedulerError(
            ErrorCode.RESOURCE_EXHAUSTED, f"{num_waiting} sequences are waiting already: try again later"
        )


def _check_servable(state: State, num_prompt_tokens: int) -> None:
    """Raise SchedulerError when a prompt can never be served by a lane like those seen so far."""
    if num_prompt_tokens == 0:
        raise SchedulerError(ErrorCode.INVALID_ARGUMENT, "the prompt is empty", "prompt")
    if state.max_model_len is not None and num_prompt_tokens >= state.max_model_len:
        raise SchedulerError(
            ErrorCode.INVALID_ARGUMENT,
            f"the prompt has {num_prompt_tokens} tokens: with one token of output that is more than the model's "
            f"context of {state.max_model_len}",
            "prompt",
        )
    if state.max_seq_tokens is not None and num_prompt_tokens >= state.max_seq_tokens:
        raise SchedulerError(
            ErrorCode.INVALID_ARGUMENT,
            f"the prompt has {num_prompt_tokens} tokens: the KV cache holds {state.max_seq_tokens}",
            "prompt",
        )


def _add_seqs(state: State, job: Job) -> list[TokenRun]:
    """Make the sequences of a new job and queue them; returns the ends of those that have all their tokens."""
    for sequence_idx in range(job.request.n):
        delivered = job.request.delivered.get(sequence_idx)
        if delivered is None or delivered.finish_reason is None:
            _add_seq(state, job, sequence_idx, delivered)
    # Sequences without output share the prompt's KV: the first computes it. Others stand for themselves.
    fresh = [seq for seq in job.seqs if not seq.num_output_tokens]
    job.unforked = fresh[1:]
    for seq in job.unforked:
        seq.state = SeqState.UNFORKED
    runs = []
    for seq in job.seqs:
        if seq.state is SeqState.WAITING:
            state.queue.add(seq)
        reason = seq.finish_reason() if seq.num_output_tokens else None
        if reason is not None:
            runs.append(end(state, seq, reason))
    return runs


def _add_seq(state: State, job: Job, sequence_idx: int, delivered: Delivered | None) -> None:
    request = job.request
    seq = Seq(
        seq_id=SeqId(next(state.seq_ids)),
        job=job,
        sequence_idx=sequence_idx,
        token_ids=[*request.prompt_token_ids, *(delivered.token_ids if delivered else ())],
        num_prompt_tokens=len(request.prompt_token_ids),
        total_limit_tokens=len(request.prompt_token_ids) + request.ending.max_tokens,
        rank=(request.priority, job.arrival, sequence_idx),
        ending=request.ending,
        precision=state.config.precision.limited_to(request.kv_precision_floor),
        num_delivered_tokens=len(delivered.token_ids) if delivered else 0,
    )
    if state.max_model_len is not None:
        seq.total_limit_tokens = min(seq.total_limit_tokens, state.max_model_len)
    job.seqs.append(seq)
    job.num_unfinished += 1
    job.tenant.num_seqs += 1
    if delivered is not None and delivered.token_ids:
        spare(seq, len(seq.token_ids))  # it was served before
    state.seqs[seq.seq_id] = seq
