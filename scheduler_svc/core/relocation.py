"""Blocks that operations of a step put in other places: narrower ones, or others of their format.

A step's operations can run in any order before its forward: a block is relocated once in a step, no place is written
twice, and none that an operation reads is written. A block's new place holds nothing before the step ran: the worker is
told its seal afterwards, and when the step fails what the block held is lost.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.kv_manager import Relocation
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import Format, StepId

_NO_STEP = StepId(0)


@dataclass(slots=True)
class Relocator:
    """Who holds which block of a lane, and where blocks go in the step that is being planned."""

    pool: BlockPool
    relocations: list[Relocation]  # of the step being planned; the owner takes and clears them
    step_id: StepId = _NO_STEP  # the step being planned
    holders: dict[Block, dict[Seq, None]] = field(default_factory=dict)  # of every referenced block
    _moving: dict[Block, StepId] = field(default_factory=dict)  # relocated by a step that has not been applied

    def hold(self, block: Block, block_idx: int, seq: Seq) -> None:
        """Note that a sequence has the block in its table."""
        holders = self.holders.get(block)
        if holders is None:
            holders = self.holders[block] = {}
            block.block_idx, block.is_awaited = block_idx, False
        holders[seq] = None

    def let_go(self, block: Block, seq: Seq) -> bool:
        """Note that a sequence has the block no more. Return whether others have it still."""
        holders = self.holders[block]
        del holders[seq]
        if not holders:
            del self.holders[block]
        return bool(holders)

    def is_on_its_way(self, block: Block) -> bool:
        """Return whether a step puts the block in a place, and has not been applied."""
        return block in self._moving

    def is_relocated_now(self, block: Block) -> bool:
        """Return whether the step being planned puts the block in another place."""
        return self._moving.get(block) == self.step_id

    def relocate(self, block: Block, fmt: Format) -> bool:
        """Have the step put the block in another place, unless it does so already. False: there is no place.

        A narrower format is made from the best copy there is.
        """
        if self.is_relocated_now(block):
            return True
        copy = block if fmt is block.fmt else self.pool.best_copy(block)
        if self.is_relocated_now(copy):
            copy = block  # the copy's own place is still to be written
        source = copy.entry
        if not self.pool.relocate(block, fmt, self.step_id):
            return False
        if copy is not block:
            self.pool.hold(copy, self.step_id)
        self._moving[block] = self.step_id
        self.relocations.append(Relocation(block, source, block.entry))
        return True

    def end_step(self, step_id: StepId, relocations: Sequence[Relocation]) -> Iterable[Block]:
        """Take note that a step has been applied; returns the sealed blocks that lie where it put them."""
        for block, *_ in relocations:
            if self._moving.get(block) == step_id:
                del self._moving[block]
                if block.block_hash is not None:
                    yield block

    def forget(self, relocations: Sequence[Relocation]) -> None:
        """Drop what relocated blocks hold: their steps failed. Nobody references them."""
        for block, *_ in relocations:
            self._moving.pop(block, None)
            self.pool.forget(block)

    def check_integrity(self, seqs: Sequence[Seq]) -> None:
        """Raise AssertionError unless the holders are those that have a block in their tables, at its position."""
        holders: dict[Block, dict[Seq, None]] = {}
        for seq in seqs:
            for block_idx, block in enumerate(seq.table):
                holders.setdefault(block, {})[seq] = None
                assert block.block_idx == block_idx, "a block at another position"
        assert holders == self.holders, "holders"
