"""What the shared index has not been told yet, as a set of questions instead of a queue of answers.

A block of which something changed is only marked; what is written of it is looked up in the cell's own index when its
turn comes. So changes of one block coalesce, what failed can be marked again whenever, and the last word is always what
holds then:

    publish, withdraw, drop ──mark──▶ marked ──────────────┐
                                                           ├──take──▶ (lane, hash, how it is held now) ──▶ Redis
    republish, renewal ─────────────▶ sweep: all that is held ┘
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, LaneId
from scheduler_svc.index.memory import MemoryIndex


class Write(NamedTuple):
    """What is to be said of a block: how the lane keeps it; None: it does not hold it."""

    lane_id: LaneId
    block_hash: BlockHash
    held: Encoding | None


class PendingWrites:
    """The writes that are due, at most `max_marks` besides the sweep, which costs no memory until its lane's turn.

    Where marks grow past the bound, those of held blocks go, and a sweep makes up for them. If that is not enough the
    others go too: the shared index then claims blocks that are gone until their keys expire or a reader complains.
    """

    def __init__(self, local: MemoryIndex, max_marks: int) -> None:
        self._local = local
        self._max_marks = max_marks
        self._marked: OrderedDict[tuple[LaneId, BlockHash], None] = OrderedDict()  # oldest first
        self._swept_lanes: deque[LaneId] = deque()
        self._swept_lane_id: LaneId | None = None
        self._swept_hashes: list[BlockHash] = []

    def __len__(self) -> int:
        waiting = sum(self._local.num_hashes_of(lane_id) for lane_id in self._swept_lanes)
        return len(self._marked) + len(self._swept_hashes) + waiting

    @property
    def has_marks(self) -> bool:
        """Whether something changed that has not been written; the sweep, which only repeats, does not count."""
        return bool(self._marked)

    def mark(self, lane_id: LaneId, block_hashes: Iterable[BlockHash]) -> None:
        """Have the state of these blocks written."""
        self._marked.update(((lane_id, block_hash), None) for block_hash in block_hashes)
        if len(self._marked) > self._max_marks:
            self._shrink()

    def mark_again(self, writes: Iterable[Write]) -> None:
        """Take back writes that failed."""
        for write in writes:
            self.mark(write.lane_id, (write.block_hash,))

    def sweep(self) -> None:
        """Have everything that is held written again, from the begin."""
        self._swept_lanes = deque(self._local.lane_ids)
        self._swept_lane_id, self._swept_hashes = None, []

    def take(self, max_writes: int) -> list[Write]:
        """Remove and return what is due next: changes first, then the sweep."""
        writes: list[Write] = []
        while self._marked and len(writes) < max_writes:
            (lane_id, block_hash), _ = self._marked.popitem(last=False)
            writes.append(Write(lane_id, block_hash, self._local.held_by(lane_id, block_hash)))
        while not writes and (self._swept_hashes or self._swept_lanes):
            writes = self._take_swept(max_writes)
        return writes

    def _take_swept(self, max_writes: int) -> list[Write]:
        if not self._swept_hashes:
            self._swept_lane_id = self._swept_lanes.popleft()
            self._swept_hashes = self._local.hashes_of(self._swept_lane_id)
        assert self._swept_lane_id is not None
        lane_id, taken = self._swept_lane_id, self._swept_hashes[-max_writes:]
        del self._swept_hashes[-max_writes:]
        # What is gone since then has been marked, and that was written before the sweep went on.
        writes = [Write(lane_id, block_hash, self._local.held_by(lane_id, block_hash)) for block_hash in taken]
        return [write for write in writes if write.held is not None]

    def _shrink(self) -> None:
        withdrawals = [mark for mark in self._marked if self._local.held_by(*mark) is None]
        if len(withdrawals) > self._max_marks // 2:
            withdrawals = []
        self._marked = OrderedDict.fromkeys(withdrawals)
        self.sweep()
