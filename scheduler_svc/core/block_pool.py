"""The blocks of one lane: reference counts, the cache of sealed blocks, and the order in which blocks are reused.

Every block is in exactly one of four states:

    blank ──allocate──▶ referenced ──release, no step in flight──▶ blank, or cached if it has a hash
      ▲                  ▲   │
      │ evict            │   └─release, a step in flight still names it──▶ quarantined ──step applied──▶ blank | cached
      └──── cached ──touch (a prefix hit; also from quarantine)

Blank blocks are used first; then cached ones are evicted, least recently released first. Callers release a table from
its end, so that a chain's tail goes before its head.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import block_id_of, block_ids, native_entry
from scheduler_svc.core.types import BlockId, Entry, Seal, StepId


@dataclass(slots=True, eq=False)
class Block:
    """One place of the arena and what is known of it. Only the pool changes it."""

    block_id: BlockId
    entry: Entry
    ref_cnt: int = 0
    block_hash: BlockHash | None = None  # set: full, computed, sealed; never written again under this hash
    quarantined_until: StepId | None = None


@dataclass(slots=True)
class BlockPool:
    """All blocks of one lane.

    Every operation is O(1) for each block it touches.
    """

    num_blocks: int
    blocks_per_slab: int
    blocks: dict[BlockId, Block] = field(init=False)
    evicted_hashes: list[BlockHash] = field(default_factory=list)  # whose last copy went; the owner takes and clears it
    num_evictions: int = 0
    _blank: deque[Block] = field(init=False)
    _cached: OrderedDict[BlockId, Block] = field(default_factory=OrderedDict)  # unreferenced, oldest first
    _quarantine: deque[tuple[StepId, Block]] = field(default_factory=deque)  # step ids never fall
    _num_quarantined: int = 0
    _by_hash: dict[BlockHash, list[Block]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = block_ids(self.num_blocks, self.blocks_per_slab)
        self.blocks = {block_id: Block(block_id, native_entry(block_id)) for block_id in ids}
        self._blank = deque(self.blocks.values())

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: blank ones and cached ones that nobody references."""
        return len(self._blank) + len(self._cached)

    @property
    def num_blank(self) -> int:
        """Blocks that hold nothing and that nobody references."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Sealed blocks that nobody references."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        """Unreferenced blocks that a step in flight still names."""
        return self._num_quarantined

    def find(self, block_hash: BlockHash) -> Block | None:
        """Return a sealed block with this hash, or None. Nothing is referenced yet: call `touch`."""
        copies = self._by_hash.get(block_hash)
        return copies[0] if copies else None

    def is_idle(self, block: Block) -> bool:
        """Return whether touching the block takes it from the available ones."""
        return block.block_id in self._cached

    def touch(self, blocks: Iterable[Block]) -> None:
        """Reference blocks that a sequence shares, so that no allocation takes them."""
        for block in blocks:
            if block.ref_cnt == 0:
                if block.quarantined_until is not None:
                    block.quarantined_until = None
                    self._num_quarantined -= 1
                else:
                    del self._cached[block.block_id]
            block.ref_cnt += 1

    def allocate(self) -> Block:
        """Return a block with one reference and no hash. The caller has made sure that one is available."""
        if self._blank:
            block = self._blank.popleft()
        else:
            _, block = self._cached.popitem(last=False)
            self._forget_hash(block)
            self.num_evictions += 1
        block.ref_cnt = 1
        return block

    def release(self, blocks: Iterable[Block], last_step_id: StepId | None) -> None:
        """Give up one reference to each block.

        A block without references waits in quarantine until `last_step_id`, the last step planned that may name it, is
        applied; None: no such step.
        """
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if last_step_id is None:
                self._make_available(block)
            else:
                block.quarantined_until = last_step_id
                self._num_quarantined += 1
                self._quarantine.append((last_step_id, block))

    def end_quarantine(self, step_id: StepId) -> None:
        """Make available what waited for `step_id`, which has been applied, or for an earlier step."""
        while self._quarantine and self._quarantine[0][0] <= step_id:
            until, block = self._quarantine.popleft()
            if block.quarantined_until == until:  # else it was touched since, and maybe released anew
                block.quarantined_until = None
                self._num_quarantined -= 1
                self._make_available(block)

    def seal(self, block: Block, block_hash: BlockHash) -> bool:
        """Record what a full block holds. Return whether it is the first copy: another block may hold the same."""
        assert block.ref_cnt > 0
        assert block.block_hash is None
        return self._map(block, block_hash)

    def restore(self, seals: Iterable[Seal]) -> list[BlockHash]:
        """Take blocks over from a worker's manifest, as cached, before anything is allocated. Return their hashes."""
        for seal in seals:
            block = self.blocks[block_id_of(seal.entry)]
            self._cached[block.block_id] = block
            self._map(block, seal.block_hash)
        self._blank = deque(block for block in self._blank if block.block_hash is None)
        return list(self._by_hash)

    def _map(self, block: Block, block_hash: BlockHash) -> bool:
        block.block_hash = block_hash
        copies = self._by_hash.setdefault(block_hash, [])
        copies.append(block)
        return len(copies) == 1

    def _make_available(self, block: Block) -> None:
        if block.block_hash is None:
            self._blank.append(block)
        else:
            self._cached[block.block_id] = block

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
        counts: dict[BlockId, int] = {}
        for table in tables:
            for block in table:
                counts[block.block_id] = counts.get(block.block_id, 0) + 1
        assert all(block.ref_cnt == counts.get(block.block_id, 0) for block in self.blocks.values()), "reference counts"
        blank = {block.block_id for block in self._blank}
        quarantined = {b.block_id for b in self.blocks.values() if b.quarantined_until is not None}
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert len(quarantined) == self._num_quarantined, "quarantine count"
        assert quarantined <= {block.block_id for _, block in self._quarantine}, "quarantine that never ends"
        states = [blank, set(self._cached), quarantined, set(counts)]
        assert sum(map(len, states)) == len(self.blocks) == len(set().union(*states)), "a block has no state, or two"
        assert all(self.blocks[i].block_hash is None for i in blank), "a blank block has a hash"
        assert all(block.block_hash is not None for block in self._cached.values()), "a cached block has no hash"
        hashed = sum(block.block_hash is not None for block in self.blocks.values())
        assert hashed == sum(map(len, self._by_hash.values())), "the map of hashes is off"
