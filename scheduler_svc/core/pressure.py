"""What is done when blocks run short, before anybody is preempted.

    1  evict     cached blocks that nobody references, the one released first before the others
    2  narrow    the oldest blocks beyond their policy, down to the floor of all that share them
    3  move      blocks out of the emptiest slabs, so that another format gets these

It begins at a watermark, because all but the first takes steps and the second takes room: what two steps write, and a
slab for each narrower format. Places in quarantine count as there: they are about to come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from scheduler_svc.core.arena import SlabArena
from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.relocation import Relocator
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import Counters, Format

MAX_NARROWED_BLOCKS = 128  # of a step: reading and writing them delays its tokens


@dataclass(slots=True)
class PressureLadder:
    """Makes room in the slabs of one lane."""

    arena: SlabArena
    pool: BlockPool
    relocator: Relocator
    block_size: int
    num_starved: int = 0  # times that a row found no room since `relieve`
    _is_exhausted: bool = False  # room was short, and no block could be narrowed
    _next_block_idx: dict[Seq, int] = field(default_factory=dict)  # all before it are as narrow as pressure makes them
    _held_wide_from: dict[Seq, int] = field(default_factory=dict)  # but those that others want wider, from here on

    def add(self, seq: Seq) -> None:
        """Begin with a row."""
        self._next_block_idx[seq] = 1

    def remove(self, seq: Seq) -> None:
        """Forget a row. What it may have held wider than others allow is looked at again."""
        del self._next_block_idx[seq]
        self._held_wide_from.pop(seq, None)
        for other in [other for other in self._held_wide_from if other.precision.floor > seq.precision.floor]:
            self._next_block_idx[other] = min(self._held_wide_from.pop(other), self._next_block_idx[other])

    def relieve(self, num_promised_blocks: int, counters: Counters) -> None:
        """Make room where it is short. Blocks change places by operations of the step being planned.

        `num_promised_blocks`: native ones that the prompts of two steps will fill.
        """
        num_wanted = -(-2 * len(self._next_block_idx) // self.block_size) + num_promised_blocks + self.num_starved
        self.num_starved = 0
        self._evict(num_wanted)
        num_before = len(self.relocator.relocations)
        is_short = self._is_short(num_wanted)
        if is_short:
            self._narrow(num_wanted)
        num_narrowed = len(self.relocator.relocations) - num_before
        self._is_exhausted = is_short and not num_narrowed
        self._move(num_wanted)
        counters.pressed_blocks += num_narrowed
        counters.moved_blocks += len(self.relocator.relocations) - num_before - num_narrowed

    def is_room_coming(self) -> bool:
        """Return whether native places come without preemption: out of quarantine, by moves, or by narrowing."""
        return (
            self.pool.num_quarantined > 0
            or self.arena.num_slabs_coming() > self.arena.reserve_slabs
            or not self._is_exhausted
        )

    def find_room(self, num_blocks: int) -> int:
        """Evict until `num_blocks` native places can be taken, or moves will do; return how many can be now.

        A row that finds none starves: `relieve` looks after it.
        """
        while (num_takeable := self.arena.num_takeable(Format.NATIVE)) < num_blocks and self.pool.num_cached:
            if self.arena.num_slabs_coming() > self.arena.reserve_slabs:
                break
            self.pool.evict_oldest()
        self.num_starved += num_blocks > 0 and num_takeable == 0
        return num_takeable

    def _evict(self, num_wanted: int) -> None:
        while self.pool.num_cached and self._is_short(num_wanted):
            self.pool.evict_oldest()

    def _narrow(self, num_wanted: int) -> None:
        """Narrow blocks beyond the policy, the oldest first, while room is short."""
        oldest = [item for seq in self._next_block_idx if (item := self._next_of(seq)) is not None]
        heapify(oldest)
        num_left = MAX_NARROWED_BLOCKS
        while oldest and num_left and self._is_short(num_wanted):
            *_, seq = oldest[0]
            block = seq.table[self._next_block_idx[seq]]
            fmt = self._pressed_format(block)
            if fmt > block.fmt:
                if self.relocator.is_relocated_now(block) or not self.relocator.relocate(block, fmt):
                    heappop(oldest)  # the next step may go on with it
                    continue
                num_left -= 1
            if fmt < self._own_format(seq, block):
                self._held_wide_from.setdefault(seq, block.block_idx)
            self._next_block_idx[seq] += 1
            following = self._next_of(seq)
            if following is None:
                heappop(oldest)
            else:
                heapreplace(oldest, following)

    def _next_of(self, seq: Seq) -> tuple[int, int, Seq] | None:
        """Return the row's next block as (age, id, row), the oldest block the smallest; None: it is not full yet."""
        age_blocks = seq.num_computed_tokens // self.block_size - 1 - self._next_block_idx[seq]
        return (-age_blocks, seq.seq_id, seq) if age_blocks >= 0 else None

    def _pressed_format(self, block: Block) -> Format:
        """Return the narrowest format that all that hold the block let pressure put it in."""
        return min(self._own_format(seq, block) for seq in self.relocator.holders[block])

    def _own_format(self, seq: Seq, block: Block) -> Format:
        """Return the narrowest format that `seq` lets pressure put the block in."""
        return seq.precision.pressed_format_of(block.block_idx, seq.num_computed_tokens // self.block_size)

    def _move(self, num_wanted: int) -> None:
        """Move blocks out of as many slabs as are short, and out of those that were not empty a step ago."""
        num_slabs = self.arena.reserve_slabs + self._num_native_slabs_wanted(num_wanted)
        while self.arena.num_free_slabs + len(self.arena.emptying) < num_slabs:
            if self.arena.start_emptying() is None:
                break
        for slab in list(self.arena.emptying.values()):
            blocks = [self.pool.blocks[block_id] for block_id in slab.block_ids()]
            if not self._move_all([block for block in blocks if block.quarantined_until is None]):
                self.arena.reopen(slab)

    def _move_all(self, blocks: Sequence[Block]) -> bool:
        """Move blocks to other slabs of their format. False: there is no place for one of them."""
        return all(self.relocator.relocate(block, block.fmt) for block in blocks)

    def _is_short(self, num_wanted: int) -> bool:
        """Return whether what is blank, in quarantine or can be emptied is less than the watermark."""
        arena = self.arena
        num_slabs = arena.num_free_slabs + len(arena.emptying) - self._num_native_slabs_wanted(num_wanted)
        for fmt, capacity in arena.capacities.items():
            num_blank = arena.num_blank_of(fmt) + self.pool.num_quarantined_of[fmt]
            if fmt is Format.NATIVE:
                num_blank = max(0, num_blank - num_wanted)
            num_slabs += num_blank // capacity
        return num_slabs < arena.reserve_slabs

    def _num_native_slabs_wanted(self, num_wanted: int) -> int:
        """Return how many slabs more native blocks need for `num_wanted` of them."""
        native = Format.NATIVE
        num_missing = num_wanted - self.arena.num_blank_of(native) - self.pool.num_quarantined_of[native]
        return max(0, -(-num_missing // self.arena.capacities[native]))
