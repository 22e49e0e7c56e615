"""The prefix index of one cell, in the scheduler's own memory."""

from collections.abc import Sequence

from protos.block_hash import BlockHash
from scheduler_svc.core.types import LaneId


class MemoryIndex:
    """A PrefixIndex in two dictionaries: the lanes of each block hash, and the block hashes of each lane.

    Every operation is O(1) for each hash it is given, times the lanes that hold it.
    """

    def __init__(self) -> None:
        self._lanes_of: dict[BlockHash, set[LaneId]] = {}
        self._hashes_of: dict[LaneId, set[BlockHash]] = {}

    def publish(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks; saying so twice changes nothing."""
        held = self._hashes_of.setdefault(lane_id, set())
        held.update(block_hashes)
        for block_hash in block_hashes:
            holders = self._lanes_of.get(block_hash)
            if holders is None:
                self._lanes_of[block_hash] = {lane_id}
            else:
                holders.add(lane_id)

    def withdraw(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks no more; unknown ones are ignored."""
        held = self._hashes_of.get(lane_id, set())
        for block_hash in block_hashes:
            if block_hash in held:
                held.remove(block_hash)
                self._remove_holder(block_hash, lane_id)

    def drop_lane(self, lane_id: LaneId) -> None:
        """Forget all that was said of the lane."""
        for block_hash in self._hashes_of.pop(lane_id, set()):
            self._remove_holder(block_hash, lane_id)

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        """Return, for each lane that holds the first hash, how many of the hashes it holds from the first on."""
        if not block_hashes:
            return {}
        lengths: dict[LaneId, int] = {}
        holding = set(self._lanes_of.get(block_hashes[0], ()))
        for num_held, block_hash in enumerate(block_hashes):
            holders = self._lanes_of.get(block_hash, set())
            lengths.update((lane_id, num_held) for lane_id in holding - holders)
            holding &= holders
            if not holding:
                return lengths
        lengths.update((lane_id, len(block_hashes)) for lane_id in holding)
        return lengths

    def _remove_holder(self, block_hash: BlockHash, lane_id: LaneId) -> None:
        holders = self._lanes_of[block_hash]
        holders.remove(lane_id)
        if not holders:
            del self._lanes_of[block_hash]
