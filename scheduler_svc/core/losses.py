"""What happens to rows when a worker, a step or a single row is lost: they start over, but not for ever."""

from scheduler_svc.core.beams import start_over
from scheduler_svc.core.ends import end, end_whole
from scheduler_svc.core.fairness import stop
from scheduler_svc.core.lane import Lane, PlannedStep
from scheduler_svc.core.policy import forget_passes
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.state import State
from scheduler_svc.core.types import ErrorCode, FailedRow, FinishReason, LaneId, SchedulerError, SeqId, TokenRun

MAX_LOSSES = 3  # a sequence lost so often without a new token is taken for the cause


def drop_lane(state: State, lane_id: LaneId) -> list[TokenRun]:
    """Remove a worker that is gone. Its sequences go back to the queue and finish elsewhere.

    One whose step was in flight at the third such loss in a row ends with an error. An unknown lane is ignored.
    """
    lane = state.lanes.pop(lane_id, None)
    if lane is None:
        return []
    state.counters.worker_losses += not lane.is_drained
    state.index.drop_lane(lane_id)
    state.router.called.pop(lane_id, None)
    lost = _rows_at_stake(lane, {seq_id for step in lane.in_flight for seq_id in step.live_seq_ids()})
    runs = []
    for seq in lane.rows():
        runs += _requeue(state, lane, seq, is_lost=seq.seq_id in lost)
    _forget_worker(state, lane_id)
    return runs


def fail_step(state: State, lane: Lane, step: PlannedStep, error: str) -> list[TokenRun]:
    """Start the lane's rows over after a step that failed as a whole: what its blocks hold is not known.

    The worker skips what is in flight and begins the restart without rows.
    """
    lost = _rows_at_stake(lane, step.live_seq_ids())
    runs = []
    for seq in lane.rows():
        runs += _requeue(state, lane, seq, is_lost=seq.seq_id in lost, error=error)
    _forget_worker(state, lane.lane_id)
    for unsure in (step, *lane.in_flight):
        lane.kv.forget(unsure.relocations)
    lane.restart, lane.finished_seq_ids = True, []
    return runs


def fail_row(state: State, lane: Lane, row: FailedRow) -> list[TokenRun]:
    """Send a row that failed back to the queue, with the sequences that were forked from what it computed."""
    failed = state.seqs.get(row.seq_id)
    if failed is None or failed.seq_epoch != row.seq_epoch or failed.lane_id != lane.lane_id:
        return []
    forked = [s for s in failed.job.seqs if s is not failed and s.lane_id == lane.lane_id and _shares_fate(s)]
    runs = _requeue(state, lane, failed, is_lost=True, error=row.error)
    for seq in forked:
        if seq.lane_id == lane.lane_id:
            runs += _requeue(state, lane, seq, is_lost=False)
    return runs


def _rows_at_stake(lane: Lane, seq_ids: set[SeqId]) -> set[SeqId]:
    """Return which rows were being computed: those named, those forked from a prompt that still was, and all beams."""
    jobs = {seq.job for seq in lane.rows() if seq.seq_id in seq_ids and _shares_fate(seq)}
    return seq_ids | {seq.seq_id for seq in lane.rows() if seq.job in jobs and _shares_fate(seq)}


def _shares_fate(seq: Seq) -> bool:
    """Return whether a row and others of its request stand on the same computation."""
    return not seq.num_output_tokens or seq.job.search is not None


def _requeue(state: State, lane: Lane, seq: Seq, *, is_lost: bool, error: str = "") -> list[TokenRun]:
    """Take a row off its lane to start over, a beam with its whole search; one lost too often in a row ends instead."""
    if seq.job.search is not None:
        return _requeue_search(state, lane, seq, is_lost=is_lost, error=error)
    seq.num_losses += is_lost
    if seq.num_losses >= MAX_LOSSES:
        # The prompt of a leader is that of the unforked, too: each of them would take three more workers with it.
        unforked = [] if seq.num_output_tokens else seq.job.unforked
        poisoned = _poisoned(seq.num_losses, error)
        return [end(state, lost, FinishReason.ERROR, poisoned) for lost in (*unforked, seq)]
    stop(seq)
    lane.remove(seq)
    lane.forget_row(seq)
    state.wait(seq)
    return []


def _requeue_search(state: State, lane: Lane, seq: Seq, *, is_lost: bool, error: str) -> list[TokenRun]:
    """Let the search of a row start over, unless another of its rows had it do so."""
    job, search = seq.job, seq.job.search
    assert search is not None
    if seq.lane_id != lane.lane_id:
        return []
    search.num_losses += is_lost
    if search.num_losses >= MAX_LOSSES:
        return end_whole(state, seq, FinishReason.ERROR, _poisoned(search.num_losses, error))
    start_over(state, lane, job)
    return []


def _forget_worker(state: State, lane_id: LaneId) -> None:
    """Forget which sequences a worker has as rows: it has none any more."""
    for seq in state.seqs.values():
        if seq.worker_lane_id == lane_id:
            seq.worker_lane_id = None
        if seq.kept_lane_id == lane_id:
            forget_passes(seq)


def _poisoned(num_losses: int, error: str) -> SchedulerError:
    message = f"the sequence was being computed at {num_losses} failures in a row"
    return SchedulerError(ErrorCode.INTERNAL, f"{message}: {error}" if error else message)
