"""The blocks of one lane: reference counts, the cache of sealed blocks, and the order in which blocks are reused.

Every block is in exactly one of four states:

    blank ──allocate──▶ referenced ──release, no step in flight──▶ blank, or cached if it has a hash
      ▲                  ▲   │
      │ evict            │   └─release, a step in flight still names it──▶ quarantined ──step applied──▶ blank | cached
      └──── cached ──touch (a prefix hit; also from quarantine)

Blank places are used first; then cached blocks are evicted, least recently released first. Callers release a table from
its end, so that a chain's tail goes before its head.

A block may be relocated, to another place of its format or of a narrower one: it stays the same block for those that
reference it, and another block, which nobody references, waits in quarantine at the place that it left.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import Arena, block_id_of, entry_of, format_of
from scheduler_svc.core.types import BlockId, Entry, Format, Seal, StepId


@dataclass(slots=True, eq=False)
class Block:
    """Where a block lies and what is known of it. Only the pool changes it, the relocator the last two fields."""

    block_id: BlockId
    entry: Entry
    fmt: Format = Format.NATIVE
    ref_cnt: int = 0
    block_hash: BlockHash | None = None  # set: full, computed, sealed; never written again under this hash
    quarantined_until: StepId | None = None
    # In lanes with several formats:
    block_idx: int = 0  # its position, the same in every table that has it
    is_awaited: bool = False  # a sequence allows a narrower format, another that shares the block does not yet


@dataclass(slots=True)
class BlockPool:
    """All blocks of one lane.

    Every operation is O(1) for each block it touches.
    """

    arena: Arena
    blocks: dict[BlockId, Block] = field(default_factory=dict)  # of every place that was ever occupied
    num_referenced: list[int] = field(default_factory=lambda: [0] * len(Format))  # blocks, by format
    num_quarantined_of: list[int] = field(default_factory=lambda: [0] * len(Format))  # likewise
    evicted_hashes: list[BlockHash] = field(default_factory=list)  # whose last copy went; the owner takes and clears it
    num_evictions: int = 0
    _cached: OrderedDict[Block, None] = field(default_factory=OrderedDict)  # unreferenced, oldest first
    _quarantine: deque[tuple[StepId, Block]] = field(default_factory=deque)  # step ids never fall
    _by_hash: dict[BlockHash, list[Block]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Native blocks that fit when nothing else is there."""
        return self.arena.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: blank ones and cached ones that nobody references."""
        return self.arena.num_blank + len(self._cached)

    @property
    def num_blank(self) -> int:
        """Native blocks that hold nothing and that nobody references."""
        return self.arena.num_blank

    @property
    def num_cached(self) -> int:
        """Sealed blocks that nobody references."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        """Unreferenced blocks that a step in flight still names."""
        return sum(self.num_quarantined_of)

    def find(self, block_hash: BlockHash) -> Block | None:
        """Return a sealed block with this hash, or None. Nothing is referenced yet: call `touch`."""
        copies = self._by_hash.get(block_hash)
        return copies[0] if copies else None

    def find_no_narrower(self, block_hash: BlockHash, narrowest: Format) -> Block | None:
        """Return, of the sealed blocks with this hash, that of the widest format, unless even that is too narrow."""
        copies = self._by_hash.get(block_hash)
        best = min(copies, key=lambda copy: copy.fmt) if copies else None
        return best if best is not None and best.fmt <= narrowest else None

    def is_idle(self, block: Block) -> bool:
        """Return whether touching the block takes it from the available ones."""
        return block in self._cached

    def touch(self, blocks: Iterable[Block]) -> None:
        """Reference blocks that a sequence shares, so that no allocation takes them."""
        for block in blocks:
            if block.ref_cnt == 0:
                if block.quarantined_until is not None:
                    block.quarantined_until = None
                    self.num_quarantined_of[block.fmt] -= 1
                else:
                    del self._cached[block]
                self.num_referenced[block.fmt] += 1
            block.ref_cnt += 1

    def allocate(self, fmt: Format = Format.NATIVE) -> Block:
        """Return a block with one reference and no hash. The caller has made sure that one is available."""
        block_id = self.arena.take(fmt)
        while block_id is None:
            self.evict_oldest()
            block_id = self.arena.take(fmt)
        block = self._block_at(block_id, fmt)
        block.ref_cnt = 1
        self.num_referenced[fmt] += 1
        return block

    def evict_oldest(self) -> None:
        """Make blank the place of the cached block that was released first; there must be one."""
        block, _ = self._cached.popitem(last=False)
        self._forget_hash(block)
        self.num_evictions += 1
        self.arena.give_back(block.block_id)

    def release(self, blocks: Iterable[Block], last_step_id: StepId | None) -> None:
        """Give up one reference to each block.

        A block without references waits in quarantine until `last_step_id`, the last step planned that may name it, is
        applied; None: no such step.
        """
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            self.num_referenced[block.fmt] -= 1
            if last_step_id is None:
                self._make_available(block)
            else:
                self._quarantine_until(last_step_id, block)

    def end_quarantine(self, step_id: StepId) -> None:
        """Make available what waited for `step_id`, which has been applied, or for an earlier step."""
        while self._quarantine and self._quarantine[0][0] <= step_id:
            until, block = self._quarantine.popleft()
            if block.quarantined_until == until:  # else it was touched since, and maybe released anew
                block.quarantined_until = None
                self.num_quarantined_of[block.fmt] -= 1
                self._make_available(block)

    def seal(self, block: Block, block_hash: BlockHash) -> bool:
        """Record what a full block holds. Return whether it is the first copy: another block may hold the same."""
        assert block.ref_cnt > 0
        assert block.block_hash is None
        return self._map(block, block_hash)

    def relocate(self, block: Block, fmt: Format, step_id: StepId) -> bool:
        """Give a block a place of that format, by an operation of the step `step_id`, which is being planned.

        The place that it leaves stays in quarantine until that step has been applied, and so does the block where
        nobody references it: else its new place might be evicted, and be written to twice in one step. Return False,
        with nothing changed, when there is no place.
        """
        block_id = self.arena.take(fmt)
        if block_id is None:
            return False
        left = self._block_at(block_id, fmt)
        if block.ref_cnt:
            self.num_referenced[block.fmt] -= 1
            self.num_referenced[fmt] += 1
        self._put(left, block.block_id, block.fmt)
        self._put(block, block_id, fmt)
        self._quarantine_until(step_id, left)
        self.hold(block, step_id)
        return True

    def hold(self, block: Block, step_id: StepId) -> None:
        """Keep an unreferenced block from being evicted until `step_id`, which is being planned, is applied."""
        if block in self._cached:
            del self._cached[block]
            self._quarantine_until(step_id, block)
        elif block.quarantined_until is not None:
            block.quarantined_until = step_id
            self._quarantine.append((step_id, block))

    def forget(self, block: Block) -> None:
        """Drop what is known of a block's contents: they were to be written by a step that failed."""
        if block.block_hash is None:
            return
        self._forget_hash(block)
        if block in self._cached:
            del self._cached[block]
            self.arena.give_back(block.block_id)

    def best_copy(self, block: Block) -> Block:
        """Return the block of the widest format that holds what `block` holds."""
        if block.block_hash is None:
            return block
        return min(self._by_hash[block.block_hash], key=lambda copy: copy.fmt)

    def restore(self, seals: Iterable[Seal]) -> dict[BlockHash, Format]:
        """Take blocks over from a worker's manifest, as cached, before anything is allocated.

        Return their hashes, each with the widest format in which there is a copy.
        """
        by_entry = {seal.entry: seal for seal in seals}
        for entry in self.arena.claim(by_entry):
            block = self._block_at(block_id_of(entry), format_of(entry))
            self._cached[block] = None
            self._map(block, by_entry[entry].block_hash)
        return {block_hash: min(copy.fmt for copy in copies) for block_hash, copies in self._by_hash.items()}

    def _block_at(self, block_id: BlockId, fmt: Format) -> Block:
        """Return the block of a place that has just been occupied."""
        block = self.blocks.get(block_id)
        if block is None:
            block = self.blocks[block_id] = Block(block_id, entry_of(block_id, fmt), fmt)
        elif block.fmt is not fmt:
            self._put(block, block_id, fmt)
        return block

    def _put(self, block: Block, block_id: BlockId, fmt: Format) -> None:
        """Say that a block lies at a place, in a format."""
        block.block_id, block.fmt, block.entry = block_id, fmt, entry_of(block_id, fmt)
        self.blocks[block_id] = block

    def _quarantine_until(self, step_id: StepId, block: Block) -> None:
        block.quarantined_until = step_id
        self.num_quarantined_of[block.fmt] += 1
        self._quarantine.append((step_id, block))

    def _map(self, block: Block, block_hash: BlockHash) -> bool:
        block.block_hash = block_hash
        copies = self._by_hash.setdefault(block_hash, [])
        copies.append(block)
        return len(copies) == 1

    def _make_available(self, block: Block) -> None:
        if block.block_hash is None:
            self.arena.give_back(block.block_id)
        else:
            self._cached[block] = None

    def _forget_hash(self, block: Block) -> None:
        assert block.block_hash is not None
        copies = self._by_hash[block.block_hash]
        copies.remove(block)
        if not copies:
            del self._by_hash[block.block_hash]
            self.evicted_hashes.append(block.block_hash)
        block.block_hash = None

    def check_integrity(self, tables: Sequence[Sequence[Block]]) -> None:
        """Raise AssertionError unless every block is in one state and every reference is one of `tables`."""
        counts: dict[Block, int] = {}
        for table in tables:
            for block in table:
                counts[block] = counts.get(block, 0) + 1
        blocks = self.blocks.values()
        assert all(block.ref_cnt == counts.get(block, 0) for block in blocks), "reference counts"
        assert all(block.block_id == block_id for block_id, block in self.blocks.items()), "a block at no place"
        assert all(block.entry == entry_of(block.block_id, block.fmt) for block in blocks), "an entry is off"
        quarantined = {block for block in blocks if block.quarantined_until is not None}
        assert quarantined <= {block for _, block in self._quarantine}, "quarantine that never ends"
        states = [set(self._cached), quarantined, set(counts)]
        occupied = set().union(*states)
        assert sum(map(len, states)) == len(occupied), "a block has two states"
        self.arena.check_integrity({block.block_id for block in occupied})
        assert all(block.block_hash is None for block in blocks if block not in occupied), "a blank block has a hash"
        assert all(block.block_hash is not None for block in self._cached), "a cached block has no hash"
        hashed = [block for block in blocks if block.block_hash is not None]
        assert len(hashed) == sum(map(len, self._by_hash.values())), "the map of hashes is off"
        for fmt in Format:
            assert self.num_referenced[fmt] == sum(block.fmt is fmt for block in counts), "referenced blocks"
            assert self.num_quarantined_of[fmt] == sum(block.fmt is fmt for block in quarantined), "quarantined blocks"
