"""The prefix index of one cell, in the scheduler's own memory."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, LaneId

_NO_HOLDERS: frozenset[LaneId] = frozenset()


class MemoryIndex:
    """A PrefixIndex in two dictionaries: the lanes of each block hash, and the blocks of each lane by their hash.

    Every operation is O(1) for each hash it is given, times the lanes that hold it.
    """

    def __init__(self) -> None:
        self._lanes_of: dict[BlockHash, set[LaneId]] = {}
        self._blocks_of: dict[LaneId, dict[BlockHash, Encoding]] = {}

    @property
    def lane_ids(self) -> list[LaneId]:
        """The lanes of which something was said."""
        return list(self._blocks_of)

    def publish(self, lane_id: LaneId, blocks: Mapping[BlockHash, Encoding]) -> None:
        """Record that the lane holds these blocks, and how; saying so twice changes nothing."""
        self._blocks_of.setdefault(lane_id, {}).update(blocks)
        for block_hash in blocks:
            holders = self._lanes_of.get(block_hash)
            if holders is None:
                self._lanes_of[block_hash] = {lane_id}
            else:
                holders.add(lane_id)

    def withdraw(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks no more; unknown ones are ignored."""
        held = self._blocks_of.get(lane_id, {})
        for block_hash in block_hashes:
            if held.pop(block_hash, None) is not None:
                self._remove_holder(block_hash, lane_id)

    def drop_lane(self, lane_id: LaneId) -> None:
        """Forget all that was said of the lane."""
        for block_hash in self._blocks_of.pop(lane_id, {}):
            self._remove_holder(block_hash, lane_id)

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        """Return, for each lane that holds the first hash, how many of the hashes it holds from the first on."""
        return prefix_lengths(self._lanes_of.get(block_hash, _NO_HOLDERS) for block_hash in block_hashes)

    def held_by(self, lane_id: LaneId, block_hash: BlockHash) -> Encoding | None:
        """Return how the lane keeps the block with this hash; None: it does not hold it."""
        blocks = self._blocks_of.get(lane_id)
        return None if blocks is None else blocks.get(block_hash)

    def hashes_of(self, lane_id: LaneId) -> list[BlockHash]:
        """Return the hashes of all blocks that the lane holds now, in no order."""
        return list(self._blocks_of.get(lane_id, ()))

    def num_hashes_of(self, lane_id: LaneId) -> int:
        """Return how many different hashes the lane's blocks have."""
        return len(self._blocks_of.get(lane_id, ()))

    def _remove_holder(self, block_hash: BlockHash, lane_id: LaneId) -> None:
        holders = self._lanes_of[block_hash]
        holders.remove(lane_id)
        if not holders:
            del self._lanes_of[block_hash]


def prefix_lengths(holders_of_blocks: Iterable[AbstractSet[LaneId]]) -> dict[LaneId, int]:
    """Return how many blocks each lane holds from the first on, given the holders of each block, in order."""
    lengths: dict[LaneId, int] = {}
    holding: set[LaneId] | None = None
    num_blocks = 0
    for num_held, holders in enumerate(holders_of_blocks):
        if holding is None:
            holding = set(holders)
        lengths.update((lane_id, num_held) for lane_id in holding - holders)
        holding &= holders
        num_blocks = num_held + 1
        if not holding:
            return lengths
    lengths.update((lane_id, num_blocks) for lane_id in holding or ())
    return lengths
