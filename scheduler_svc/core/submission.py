"""How requests come in: what can never be served is refused, the rest becomes a job of one sequence for each sample."""

from scheduler_svc.core import beams
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.ends import end, end_whole
from scheduler_svc.core.fairness import spare
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.precision import name_of
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.state import State
from scheduler_svc.core.types import (
    BeamParams,
    Delivered,
    ErrorCode,
    FinishReason,
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
    _check_servable(state, request)
    arrival = next(state.arrivals) + (_RESUBMITTED if request.is_resubmit else 0)
    job = Job(request, arrival, state.queue.tenant(request.tenant))
    runs = _add_seqs(state, job) if request.beam_search is None else _add_search(state, job, request.beam_search)
    if job.num_unfinished:
        state.jobs[request.request_id] = job
    return runs


def learn_limits(state: State, lane: Lane, max_model_len: int) -> list[TokenRun]:
    """Note what a new lane can serve, and end what was queued before that was known and exceeds it; clamp the rest.

    What was delivered of a sequence may be all that there is room for.
    """
    max_model_len = state.max_model_len = max(state.max_model_len or 0, max_model_len)
    for floor, num_tokens in lane.kv.max_seq_tokens.items():
        state.max_seq_tokens[floor] = max(state.max_seq_tokens.get(floor, 0), num_tokens)
    state.max_lane_rows = max(state.max_lane_rows or 0, lane.max_num_seqs)
    runs = []
    for seq in tuple(state.seqs.values()):
        seq.total_limit_tokens = min(seq.num_prompt_tokens + seq.ending.max_tokens, max_model_len)
        try:
            _check_servable(state, seq.job.request)
        except SchedulerError as error:
            if seq.state is not SeqState.FINISHED:  # with its search
                runs += end_whole(state, seq, FinishReason.ERROR, error)
        else:
            runs += _end_complete(state, seq)
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


def _check_servable(state: State, request: Request) -> None:
    """Raise SchedulerError when a request can never be served by a lane like those seen so far.

    What was let in before a restart had a lane with room for it, which may come back (or it ends as homeless).
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise SchedulerError(ErrorCode.INVALID_ARGUMENT, "the prompt is empty", "prompt")
    if state.max_model_len is not None and num_prompt_tokens >= state.max_model_len:
        raise SchedulerError(
            ErrorCode.INVALID_ARGUMENT,
            f"the prompt has {num_prompt_tokens} tokens: with one token of output that is more than the model's "
            f"context of {state.max_model_len}",
            "prompt",
        )
    limits, precision = {} if request.is_resubmit else state.max_seq_tokens, state.config.precision
    floor = precision.limited_to(request.kv_precision_floor).floor
    if limits and num_prompt_tokens >= limits[floor]:
        raise SchedulerError(
            ErrorCode.INVALID_ARGUMENT,
            f"the prompt has {num_prompt_tokens} tokens: the KV cache holds {limits[floor]} in blocks down to "
            f"{name_of(floor)}",
            "prompt" if num_prompt_tokens >= limits[precision.floor] else "kv_precision_floor",
        )
    if request.beam_search is not None:
        _check_width(state, request)


def _check_width(state: State, request: Request) -> None:
    """Raise SchedulerError when a beam search can never have a row for each beam."""
    lane_rows = None if request.is_resubmit else state.max_lane_rows
    for owner, num_rows in (("a worker", lane_rows), ("a tenant", state.config.fairness.max_running_seqs)):
        if num_rows is not None and request.n > num_rows:
            message = f"a beam search of width {request.n} is wider than the {num_rows} rows that {owner} may have"
            raise SchedulerError(ErrorCode.INVALID_ARGUMENT, message, "n")


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
    for seq in job.seqs:
        if seq.state is SeqState.WAITING:
            state.wait(seq)
    return [run for seq in tuple(job.seqs) for run in _end_complete(state, seq)]


def _end_complete(state: State, seq: Seq) -> list[TokenRun]:
    """End a waiting sequence that was delivered to its last token; returns that end."""
    if seq.state is not SeqState.WAITING or not seq.num_output_tokens:
        return []
    reason = seq.finish_reason()
    return [end(state, seq, reason)] if reason is not None else []


def _add_search(state: State, job: Job, params: BeamParams) -> list[TokenRun]:
    """Make the sequences of a beam search and queue it. It starts over, whatever of its answers was delivered."""
    request = job.request
    ends = [request.delivered[idx].finish_reason if idx in request.delivered else None for idx in range(request.n)]
    if None not in ends:
        return []
    job.search = BeamSearch(params, request.n, len(request.prompt_token_ids), request.ending.stop_token_ids)
    for sequence_idx, finish_reason in enumerate(ends):
        _add_seq(state, job, sequence_idx, None)
        if finish_reason is not None:
            job.seqs[sequence_idx].ended_run(finish_reason, None)
    beams.begin(state, job)
    return []


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
