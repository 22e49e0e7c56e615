"""Which lane a waiting sequence should go to. A sequence is bound late: only when a lane has room for it.

What a sequence costs in a lane is counted in prompt tokens to compute: those of its own that are not cached there,
those that rows before it still have to compute, and for each row what it slows down every step of this one. So a prefix
draws requests to the lane that has it, until that lane has so much to do that computing the prefix anew is quicker.
"""

from collections.abc import Iterable

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.policy import watermark_blocks
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import PrefixIndex

ROW_COST_TOKENS = 128  # about what a hundred steps of one row more cost the others


def has_better_lane(seq: Seq, lane: Lane, num_hits: int, lanes: Iterable[Lane], index: PrefixIndex) -> bool:
    """Return whether a lane that has room for `seq` too serves it sooner than `lane`, where it finds `num_hits` blocks.

    A lane that cannot plan before one of its steps has been applied must be better by a row, and have more of the
    prefix if `lane` is idle. Of lanes of equal cost the one with more free blocks is better. The index only says where
    to look: the lane's own tables decide.
    """
    hints = index.longest_prefix(seq.block_hashes(lane.kv.block_size))
    cost_tokens, num_available = _cost_tokens(seq, lane, num_hits), lane.kv.pool.num_available
    for other in lanes:
        if (
            other is lane
            or other.is_draining
            or other.num_free_rows < seq.num_wanted_rows
            or not other.could_serve(seq)
        ):
            continue
        hits = other.kv.cached_prefix(seq) if other.lane_id in hints else []
        other_cost_tokens = _cost_tokens(seq, other, len(hits))
        if not other.can_plan():
            if not lane.num_rows and len(hits) <= num_hits:
                continue
            other_cost_tokens += ROW_COST_TOKENS
        is_better = (other_cost_tokens, -other.kv.pool.num_available) < (cost_tokens, -num_available)
        if is_better and other.kv.can_admit(seq, hits, watermark_blocks(other, seq)):
            return True
    return False


def _cost_tokens(seq: Seq, lane: Lane, num_hits: int) -> int:
    num_uncached = len(seq.token_ids) - num_hits * lane.kv.block_size
    num_before = sum(len(row.token_ids) - row.num_computed_tokens for row in lane.prefilling.values())
    return num_uncached + num_before + ROW_COST_TOKENS * lane.num_rows
