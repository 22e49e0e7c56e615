"""How rows join a lane: how often a waiting sequence may be passed, and how many blocks an admission leaves free."""

from enum import Enum

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import LaneId

MAX_TIMES_PASSED = 64
MAX_PASSED_MS = 2000


class SchedulingPolicy(Enum):
    """How rows join a lane. Static batching is there to measure continuous batching against."""

    CONTINUOUS = "continuous"  # rows join and leave at every step
    STATIC = "static"  # a batch is filled, then runs until its last row has ended


def pass_over(seq: Seq, now_ms: int) -> None:
    """Record that another sequence was admitted before `seq`, which did not fit, or has its prefix elsewhere."""
    seq.times_passed += 1
    if seq.passed_since_ms is None:
        seq.passed_since_ms = now_ms


def keeps_lane(seq: Seq, lane_id: LaneId, now_ms: int) -> bool:
    """Return whether the lane admits nobody until `seq` fits: it was passed too long or too often. One lane only."""
    if seq.kept_lane_id is None and (
        seq.times_passed >= MAX_TIMES_PASSED
        or (seq.passed_since_ms is not None and now_ms - seq.passed_since_ms >= MAX_PASSED_MS)
    ):
        seq.kept_lane_id = lane_id
    return seq.kept_lane_id == lane_id


def forget_passes(seq: Seq) -> None:
    """Start anew: `seq` is admitted, or the lane kept for it has gone."""
    seq.times_passed, seq.passed_since_ms, seq.kept_lane_id = 0, None, None


def watermark_blocks(lane: Lane, seq: Seq) -> int:
    """Return how many blocks an admission leaves free: a tail for each running row, and for each beam to come.

    For a sequence that was preempted it leaves four, so that it is not thrown out again sixteen steps later.
    """
    if not lane.num_rows:
        return 0  # a beam search too may try, where it has the lane for itself
    return (lane.num_rows + seq.num_wanted_rows - 1) * (1 if seq.seq_epoch == 0 else 4)
