"""The prefix index of one cell, in the scheduler's own memory."""

from collections.abc import Mapping, Sequence

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, LaneId


class MemoryIndex:
    """A PrefixIndex in two dictionaries: the lanes of each block hash, and the blocks of each lane by their hash.

    A set of lanes is an integer with one bit for each: comparing the holders of two blocks is one operation, however
    many hold them, and a popular block takes no more room than a rare one.
    """

    def __init__(self) -> None:
        self._holders_of: dict[BlockHash, int] = {}  # never 0
        self._blocks_of: dict[LaneId, dict[BlockHash, Encoding]] = {}
        self._bit_of: dict[LaneId, int] = {}  # of the lanes in _blocks_of
        self._lane_of: dict[int, LaneId] = {}  # by bit

    @property
    def lane_ids(self) -> list[LaneId]:
        """The lanes of which something was said."""
        return list(self._blocks_of)

    def publish(self, lane_id: LaneId, blocks: Mapping[BlockHash, Encoding]) -> None:
        """Record that the lane holds these blocks, and how; saying so twice changes nothing."""
        if lane_id not in self._blocks_of:
            self._add_lane(lane_id)
        self._blocks_of[lane_id].update(blocks)
        holders_of, bit = self._holders_of, self._bit_of[lane_id]
        for block_hash in blocks:
            holders_of[block_hash] = holders_of.get(block_hash, 0) | bit

    def withdraw(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks no more; unknown ones are ignored."""
        held = self._blocks_of.get(lane_id, {})
        for block_hash in block_hashes:
            if held.pop(block_hash, None) is not None:
                self._remove_holder(block_hash, self._bit_of[lane_id])

    def drop_lane(self, lane_id: LaneId) -> None:
        """Forget all that was said of the lane."""
        bit = self._bit_of.pop(lane_id, 0)
        for block_hash in self._blocks_of.pop(lane_id, {}):
            self._remove_holder(block_hash, bit)
        self._lane_of.pop(bit, None)

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        """Return, for each lane that holds the first hash, how many of the hashes it holds from the first on."""
        lengths: dict[LaneId, int] = {}
        holding, num_held = -1, 0  # -1: every bit
        for block_hash in block_hashes:
            still_holding = holding & self._holders_of.get(block_hash, 0)
            if still_holding != holding and num_held:
                self._note_length(lengths, holding ^ still_holding, num_held)
            if not still_holding:
                return lengths
            holding = still_holding
            num_held += 1
        if num_held:
            self._note_length(lengths, holding, num_held)
        return lengths

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

    def _add_lane(self, lane_id: LaneId) -> None:
        """Give a lane the lowest bit that no other has."""
        used = sum(self._lane_of)
        bit = ~used & (used + 1)
        self._blocks_of[lane_id], self._bit_of[lane_id], self._lane_of[bit] = {}, bit, lane_id

    def _note_length(self, lengths: dict[LaneId, int], lanes: int, num_blocks: int) -> None:
        """Set the length of each lane whose bit is in `lanes`."""
        while lanes:
            bit = lanes & -lanes
            lengths[self._lane_of[bit]] = num_blocks
            lanes ^= bit

    def _remove_holder(self, block_hash: BlockHash, bit: int) -> None:
        holders = self._holders_of[block_hash] ^ bit
        if holders:
            self._holders_of[block_hash] = holders
        else:
            del self._holders_of[block_hash]
