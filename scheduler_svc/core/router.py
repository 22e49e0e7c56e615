"""Which lane a waiting sequence should go to. A sequence is bound late: only when a lane has room for it."""

from collections.abc import Iterable

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.policy import watermark_blocks
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import PrefixIndex


def has_better_lane(seq: Seq, lane: Lane, num_hits: int, lanes: Iterable[Lane], index: PrefixIndex) -> bool:
    """Return whether a lane that has room for `seq` too serves it better than `lane`, where it finds `num_hits` blocks.

    Cached prefix tokens count first, then, among lanes that can plan at once, free blocks and fewer rows. The index
    only says where to look: the lane's own tables decide.
    """
    hints = index.longest_prefix(seq.block_hashes(lane.kv.block_size))
    score = (num_hits, lane.kv.pool.num_available, -lane.num_rows)
    for other in lanes:
        if other is lane or other.is_draining or other.num_rows >= other.max_num_seqs:
            continue
        hits = other.kv.cached_prefix(seq) if other.lane_id in hints else []
        if len(hits) <= num_hits and not other.can_plan():
            continue
        is_better = (len(hits), other.kv.pool.num_available, -other.num_rows) > score
        if is_better and other.kv.can_admit(seq, hits, watermark_blocks(other, seq)):
            return True
    return False
