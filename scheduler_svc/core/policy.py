"""Who goes next: the queue of waiting sequences, who may be passed, and when a lane takes new rows."""

from bisect import insort
from collections.abc import Iterator
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


class WaitingQueue:
    """Waiting sequences by rank: priority, then age, then index."""

    def __init__(self) -> None:
        self._seqs: list[Seq] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Seq]:
        """Iterate over a snapshot, best rank first: the queue may change meanwhile."""
        return iter(tuple(self._seqs))

    def add(self, seq: Seq) -> None:
        """Put `seq` in its place."""
        insort(self._seqs, seq, key=_rank)

    def remove(self, seq: Seq) -> None:
        """Take `seq` out; it must be in."""
        self._seqs.remove(seq)


def _rank(seq: Seq) -> tuple[int, int, int]:
    return seq.rank


def newest(seqs: list[Seq]) -> Seq:
    """Return whom to preempt: the lowest priority, of these the latest to arrive."""
    return max(seqs, key=_rank)


def pass_over(seq: Seq, now_ms: int) -> None:
    """Record that another sequence was admitted before `seq`, which did not fit."""
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
    """Return how many blocks an admission leaves free: a tail for each running row.

    For a sequence that was preempted it leaves four, so that it is not thrown out again sixteen steps later.
    """
    return lane.num_rows * (1 if seq.seq_epoch == 0 else 4)
