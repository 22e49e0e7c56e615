"""Which lane a waiting sequence should go to. A sequence is bound late: only when a lane has room for it.

What a sequence costs in a lane is counted in prompt tokens to compute: those of its own that are not cached there,
those that rows before it still have to compute, and for each row what it slows down every step of this one. So a prefix
draws requests to the lane that has it, until that lane has so much to do that computing the prefix anew is quicker.

Lanes plan one by one, and each looks at all that waits. For a look to cost the same however many lanes there are, the
first lane that leaves a sequence to a better one notes which. Those that plan next compare themselves with that one
alone, and only a lane that beats it compares all.

    a sequence waits ──▶ of the lanes that can plan the best is called
    a lane plans     ──▶ is the noted lane better still? ─ yes ─▶ left to it
                              │ no
                              ▼
                         is any lane better? ─ yes ─▶ noted, called if it can plan, and left to it
                              │ no
                              ▼
                         bound here
    a lane is full   ──▶ a lane that idles is called for what it did not come to, and for what does not fit

Where lanes are full there is nothing to choose, and whichever has room next would take what waits longest. There the
planner takes first those of whose prefix no other lane has more (`is_longer_elsewhere`).

A lane to which nothing happened has something to plan only when it is called; or when time has passed, a limit or a
deadline has ended: what waits is looked at anew at every tick of the cell.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.block_pool import Block
from scheduler_svc.core.fairness import FairQueue
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.policy import watermark_blocks
from scheduler_svc.core.sequence import BetterLane, Seq
from scheduler_svc.core.types import LaneId, PrefixIndex

ROW_COST_TOKENS = 128  # about what a hundred steps of one row more cost the others


@dataclass(slots=True, eq=False)
class Router:
    """Compares the lanes of a cell. What the index says is a hint: a lane's own tables decide."""

    lanes: Mapping[LaneId, Lane]
    index: PrefixIndex
    queue: FairQueue
    called: dict[LaneId, None] = field(default_factory=dict)  # lanes to plan; the owner takes and clears them

    def call_lane_for(self, seq: Seq) -> None:
        """Call the lane that serves `seq`, which waits from now on, soonest of those that can plan and have room."""
        free = [lane for lane in self.lanes.values() if lane.can_plan()]
        if len(free) > 1:
            hints = self._hints(seq, free[0].kv.block_size)
            costs = [(_cost_tokens(lane, hints.get(lane.lane_id, 0)), lane) for lane in free]
            free = [lane for lane, _ in self._with_room(seq, costs, hints)][:1]
        for lane in free:
            self.called[lane.lane_id] = None

    def call_idle_lane(self, lane: Lane, unseen: Iterator[Seq]) -> None:
        """Where another lane idles, call one for the first sequence that `lane` did not come to: it was left to it."""
        others = (other for other in self.lanes.values() if other is not lane)
        is_any_idle = any(not other.in_flight and not other.is_draining for other in others)
        if is_any_idle and (seq := next(unseen, None)) is not None:
            self.call_lane_for(seq)

    def leave_to_better(self, seq: Seq, lane: Lane, num_hits: int) -> bool:
        """Leave `seq` to a lane that has room for it too and serves it sooner than `lane`, where it finds `num_hits`.

        Returns whether there is one. A lane that cannot plan before one of its steps has been applied must be better by
        a row, and have more of the prefix if `lane` is idle. Of lanes of equal cost the one with more free blocks is
        better.
        """
        if len(self.lanes) == 1:
            return False
        if self.leave_to_noted(seq, lane, num_hits):
            return True
        better = self._find_better_lane(seq, lane, num_hits)
        if better is not None and better.can_plan():
            self.called[better.lane_id] = None
        return better is not None

    def is_longer_elsewhere(self, seq: Seq, lane: Lane, num_hits: int) -> bool:
        """Return whether another lane, full or not, had most of the prefix of `seq` when that was first asked."""
        if len(self.lanes) == 1:
            return False
        if seq.longest_hint is None:
            hints = self._hints(seq, lane.kv.block_size)
            seq.longest_hint = max(hints.items(), key=lambda hint: hint[1], default=(lane.lane_id, 0))
        holder_id, num_held = seq.longest_hint
        return num_held > num_hits and holder_id != lane.lane_id and holder_id in self.lanes

    def leave_to_noted(self, seq: Seq, lane: Lane, num_hits: int | None = None) -> bool:
        """Leave `seq` to the lane to which it was left last, where that has room still and is better than `lane`.

        Returns whether it is. `num_hits` None: whatever `lane` has of the prefix, as long as it is not more than any
        lane had then. A lane that idles is called: when it looked last, a limit may have kept `seq` from it.
        """
        noted = seq.better_lane
        if noted is None or noted.lane_id == lane.lane_id:
            return False
        other = self.lanes.get(noted.lane_id)
        if other is None:
            return False
        num_hits = noted.most_hits if num_hits is None else num_hits
        is_better = _cost_tokens(other, noted.num_hits) < _cost_tokens(lane, num_hits, is_planning=True)
        if not is_better or not _is_worth_waiting(other, noted.num_hits, lane, num_hits):
            return False
        has_room = self._has_room(seq, other, ())
        if has_room and not other.in_flight:
            self.called[other.lane_id] = None
        return has_room

    def _find_better_lane(self, seq: Seq, lane: Lane, num_hits: int) -> Lane | None:
        """Return the best lane, where that is not `lane`, and note it."""
        block_size = lane.kv.block_size
        hints = self._hints(seq, block_size)
        own = _cost_tokens(lane, num_hits, is_planning=True), -lane.kv.pool.num_available
        no_worse = [
            (_cost_tokens(other, hints.get(lane_id, 0)), other)
            for lane_id, other in self.lanes.items()
            # A lower bound of the cost, without a call: all lanes come by here.
            if other.num_uncomputed_tokens + ROW_COST_TOKENS * other.num_rows
            <= own[0] + hints.get(lane_id, 0) * block_size
            and other is not lane
        ]
        for other, hits in self._with_room(seq, no_worse, hints):
            is_better = (_cost_tokens(other, len(hits)), -other.kv.pool.num_available) < own
            if is_better and _is_worth_waiting(other, len(hits), lane, num_hits):
                seq.better_lane = BetterLane(other.lane_id, len(hits), max(num_hits, len(hits), *hints.values()))
                return other
        return None

    def _hints(self, seq: Seq, block_size: int) -> Mapping[LaneId, int]:
        """Return how many blocks of its prefix, of those that `seq` could use, lanes hold."""
        if seq.job.request.skip_cache_read:
            return {}
        most = (len(seq.token_ids) - 1) // block_size
        return self.index.longest_prefix(seq.block_hashes(block_size)[:most])

    def _with_room(
        self, seq: Seq, costs: Iterable[tuple[int, Lane]], hints: Mapping[LaneId, int]
    ) -> Iterator[tuple[Lane, Sequence[Block]]]:
        """Yield the lanes that have room for `seq` with what they hold of its prefix, those of least cost first."""
        order = sorted(costs, key=lambda item: (item[0], -item[1].kv.pool.num_available))
        for _, lane in order:
            hits = lane.kv.cached_prefix(seq) if lane.lane_id in hints else ()
            if self._has_room(seq, lane, hits):
                yield lane, hits

    def _has_room(self, seq: Seq, lane: Lane, hits: Sequence[Block]) -> bool:
        """Return whether the lane would take `seq` now."""
        return (
            not lane.is_draining
            and (not lane.is_kept or seq.kept_lane_id == lane.lane_id)
            and (lane.is_batch_open or not lane.num_rows)
            and lane.num_free_rows >= seq.num_wanted_rows
            and lane.could_serve(seq)
            and lane.kv.can_admit(seq, hits, watermark_blocks(lane, seq))
            and not self.queue.exceeds_kv_share(seq, lane)
        )


def _cost_tokens(lane: Lane, num_hits: int, *, is_planning: bool = False) -> int:
    """Return what a sequence costs in a lane, beyond its own tokens; a lane that cannot plan yet counts a row more."""
    num_rows = lane.num_rows + (not is_planning and not lane.can_plan())
    num_before = lane.num_uncomputed_tokens + lane.num_planned_tokens
    return num_before + ROW_COST_TOKENS * num_rows - num_hits * lane.kv.block_size


def _is_worth_waiting(other: Lane, num_other_hits: int, lane: Lane, num_hits: int) -> bool:
    """Return whether an idle lane may leave a sequence to one that cannot plan yet: that has more of its prefix."""
    return bool(lane.num_rows) or other.can_plan() or num_other_hits > num_hits
