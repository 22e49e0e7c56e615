"""The block tables of one lane: prefix hits, reservations, growth, copy-on-write, sealing.

Sequences get blocks as their tokens come; what a prompt will still need is reserved when it is admitted, so that two
half-computed prompts never wait for each other's blocks:

    num_available = blank + cached and unreferenced >= num_reserved_blocks, always

A block is written only while one sequence references it and it has no hash: the first write to a shared or sealed tail
block goes to a copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import format_of
from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import Counters, Encoding, Entry, Format, Seal, StepId


class Relocation(NamedTuple):
    """A block that an operation of a step puts in another place."""

    block: Block
    source: Entry  # what the operation reads: the place that the block leaves, or a better copy of it
    destination: Entry


class Growth(NamedTuple):
    """What one step's tokens ask of a sequence's table."""

    new_entries: Sequence[Entry] = ()
    zero: Sequence[Entry] = ()  # new blocks that the step does not fill
    copied: tuple[int, Block, Block] | None = None  # (position in the table, shared block, its copy)


_NO_GROWTH = Growth()


@dataclass(slots=True)
class KVManager:
    """Block tables over one lane's pool. Of a sequence it changes the table and what goes with it.

    Here all blocks are native; `mixed_kv` has the manager of lanes with several formats.
    """

    pool: BlockPool
    block_size: int
    enable_prefix_caching: bool
    recipe_versions: Mapping[Format, int]  # of the worker; 0 where it says nothing
    max_seq_tokens: Mapping[Format, int]  # of the longest sequence that the whole pool holds, by its floor
    num_reserved_blocks: int = 0
    new_seals: list[Seal] = field(default_factory=list)  # for the worker; the owner takes and clears them
    new_hashes: dict[BlockHash, Encoding] = field(default_factory=dict)  # for the index; likewise
    relocations: list[Relocation] = field(default_factory=list)  # of the step being planned; likewise
    _computing: dict[BlockHash, Seq] = field(default_factory=dict)  # prompt blocks that a running sequence will seal

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def can_hold(self, num_tokens: int, floor: Format) -> bool:
        """Return whether the whole pool is enough for a sequence of `num_tokens` whose blocks go down to `floor`."""
        return num_tokens <= self.max_seq_tokens[floor]

    def num_native_blocks(self, seq: Seq) -> float:
        """Return the room that all known tokens of `seq` take, in native blocks; what it shares counts in full."""
        return self.num_blocks_for(len(seq.token_ids))

    def cached_prefix(self, seq: Seq) -> list[Block]:
        """Return the sealed blocks that `seq` can start with. One token at least is left to compute."""
        if not self.enable_prefix_caching or seq.job.request.skip_cache_read:
            return []
        hits: list[Block] = []
        most = (len(seq.token_ids) - 1) // self.block_size
        for block_idx, block_hash in enumerate(seq.block_hashes(self.block_size)[:most]):
            block = self._hit(seq, block_idx, block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def awaits_prefix(self, seq: Seq, num_hits: int) -> bool:
        """Return whether another sequence is about to seal the block that `seq` would compute first."""
        if not self.enable_prefix_caching or seq.job.request.skip_cache_read:
            return False
        hashes = seq.block_hashes(self.block_size)
        return num_hits < (len(seq.token_ids) - 1) // self.block_size and hashes[num_hits] in self._computing

    def can_admit(self, seq: Seq, hits: Sequence[Block], watermark_blocks: int) -> bool:
        """Return whether all known tokens of `seq` fit beside what is reserved, with `watermark_blocks` to spare."""
        num_idle_hits = sum(map(self.pool.is_idle, hits))
        num_new = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        return self.pool.num_available - self.num_reserved_blocks - num_idle_hits - num_new >= watermark_blocks

    def admit(self, seq: Seq, hits: Sequence[Block]) -> None:
        """Give `seq` its hits, touched before anything else is allocated, and reserve the rest of its known tokens."""
        self.pool.touch(hits)
        seq.table = list(hits)
        seq.num_sealed_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * self.block_size
        seq.num_reserved_blocks = self.num_blocks_for(len(seq.token_ids)) - len(hits)
        self.num_reserved_blocks += seq.num_reserved_blocks
        if self.enable_prefix_caching:
            for block_hash in seq.block_hashes(self.block_size)[len(hits) :]:
                self._computing.setdefault(block_hash, seq)

    def relocate(self, step_id: StepId, counters: Counters) -> None:
        """Put blocks in other places, by operations of the step `step_id`; before anything else of it is planned."""

    def num_tokens_with_room(self, seq: Seq, num_tokens: int) -> int:
        """Return for how many of the next `num_tokens` of a prompt there is room now; here they were reserved."""
        return num_tokens

    @property
    def is_row_starving(self) -> bool:
        """Whether a row waits for room that only `relocate` makes; here none does."""
        return False

    def is_room_coming(self, seq: Seq) -> bool:
        """Return whether `seq` gets room for its next token once the steps in flight have been applied."""
        num_new, shared = self._missing(seq, 1)
        return self.pool.num_quarantined >= num_new + (shared is not None)

    def grow(self, seq: Seq, num_tokens: int) -> Growth | None:
        """Make room for the next `num_tokens` of `seq`; None, with nothing changed, when blocks are short.

        A copied block keeps its reference to the shared one: release that once the step is planned.
        """
        num_new, shared = self._missing(seq, num_tokens)
        num_missing = num_new + (shared is not None)
        if not self._has_room(seq, num_missing):
            return None
        copied = self._copy_tail(seq, shared) if shared is not None else None
        new_blocks = [self._take_block(seq) for _ in range(num_new)]
        seq.table += new_blocks
        # Decodes pass without a look at the table, up to the one that fills it or gives the last token.
        seq.settled_until_tokens = min(len(seq.table) * self.block_size, seq.total_limit_tokens) - 1
        if num_missing == 0:
            return _NO_GROWTH
        new_entries = [block.entry for block in new_blocks]
        is_last_full = (seq.num_computed_tokens + num_tokens) % self.block_size == 0
        return Growth(new_entries, () if is_last_full else new_entries[-1:], copied)

    def fork(self, parent: Seq, child: Seq) -> None:
        """Share the parent's blocks with `child`, which computes the last known token of both again.

        A block that would hold that token alone is left out: there is nothing in it to share.
        """
        num_computed = len(child.token_ids) - 1
        child.table = parent.table[: self.num_blocks_for(num_computed)]
        self.pool.touch(child.table)
        child.num_computed_tokens = num_computed
        num_full = num_computed // self.block_size
        child.share_hashes(parent, num_full)
        child.num_sealed_blocks = min(parent.num_sealed_blocks, num_full)
        parent.settled_until_tokens = 0

    def commit(self, seq: Seq, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` is computed, and seal the blocks that became full."""
        num_full = num_tokens // self.block_size
        if not self.enable_prefix_caching or seq.num_sealed_blocks >= num_full:
            return
        hashes = seq.block_hashes(self.block_size)
        for block_idx in range(seq.num_sealed_blocks, num_full):
            block, block_hash = seq.table[block_idx], hashes[block_idx]
            if block.block_hash is None:  # else a fork sealed it
                if self.pool.seal(block, block_hash):
                    self.new_hashes[block_hash] = self._encoding(block.fmt)
                self._seal_at_worker(block, block_hash)
            self._stop_computing(block_hash, seq)
        seq.num_sealed_blocks = num_full

    def release(self, seq: Seq, last_step_id: StepId | None) -> None:
        """Give back all that `seq` holds, the tail first; see BlockPool.release for `last_step_id`."""
        self.pool.release(reversed(seq.table), last_step_id)
        self.num_reserved_blocks -= seq.num_reserved_blocks
        if self.enable_prefix_caching:
            for block_hash in seq.block_hashes(self.block_size)[seq.num_sealed_blocks :]:
                self._stop_computing(block_hash, seq)

    def end_step(self, step_id: StepId, relocations: Sequence[Relocation]) -> None:
        """Take note that a step with these relocations has been applied, its other blocks sealed."""

    def forget(self, relocations: Sequence[Relocation]) -> None:
        """Drop what relocated blocks hold: their steps failed. Nobody references them."""

    def restore(self, seals: Iterable[Seal]) -> dict[BlockHash, Encoding]:
        """Take over the blocks of a worker's manifest that are made as it makes them now; return them for the index."""
        known = [seal for seal in seals if seal.recipe_version == self._encoding(format_of(seal.entry)).recipe_version]
        return {block_hash: self._encoding(fmt) for block_hash, fmt in self.pool.restore(known).items()}

    def holders_of(self, block: Block) -> Iterable[Seq]:
        """Return the sequences whose tables a relocation of the block changes."""
        return ()

    def _hit(self, seq: Seq, block_idx: int, block_hash: BlockHash) -> Block | None:
        """Return the block that `seq` can use in this position."""
        return self.pool.find(block_hash)

    def _has_room(self, seq: Seq, num_missing: int) -> bool:
        """Return whether `seq` can take so many blocks now."""
        return self.pool.num_available - self.num_reserved_blocks + seq.num_reserved_blocks >= num_missing

    def _seal_at_worker(self, block: Block, block_hash: BlockHash) -> None:
        """Have the worker note what a block holds."""
        self.new_seals.append(Seal(block.entry, block_hash, self._encoding(block.fmt).recipe_version))

    def _encoding(self, fmt: Format) -> Encoding:
        return Encoding(fmt, self.recipe_versions.get(fmt, 0))

    def _missing(self, seq: Seq, num_tokens: int) -> tuple[int, Block | None]:
        """Return how many blocks the next `num_tokens` add, and the block to copy before, if one must be."""
        num_computed, num_blocks = seq.num_computed_tokens, len(seq.table)
        num_new = -(-(num_computed + num_tokens) // self.block_size) - num_blocks
        block_idx = num_computed // self.block_size
        if block_idx >= num_blocks:
            return num_new, None
        tail = seq.table[block_idx]
        return num_new, tail if tail.ref_cnt > 1 or tail.block_hash is not None else None

    def _copy_tail(self, seq: Seq, shared: Block) -> tuple[int, Block, Block]:
        """Put a new block in the place of the one that must not be written; return Growth.copied."""
        block_idx = seq.num_computed_tokens // self.block_size
        seq.table[block_idx] = self._take_block(seq)
        return block_idx, shared, seq.table[block_idx]

    def _take_block(self, seq: Seq) -> Block:
        if seq.num_reserved_blocks:
            seq.num_reserved_blocks -= 1
            self.num_reserved_blocks -= 1
        return self.pool.allocate()

    def _stop_computing(self, block_hash: BlockHash, seq: Seq) -> None:
        if self._computing.get(block_hash) is seq:
            del self._computing[block_hash]

    def check_integrity(self, seqs: Sequence[Seq]) -> None:
        """Raise AssertionError unless pool, tables and reservations agree. `seqs`: all rows of the lane."""
        self.pool.check_integrity([seq.table for seq in seqs])
        assert self.num_reserved_blocks == sum(seq.num_reserved_blocks for seq in seqs)
        self._check_promises()
        assert set(self._computing.values()) <= set(seqs), "a block is computed by nobody"
        for seq in seqs:
            assert len(seq.table) >= self.num_blocks_for(seq.num_computed_tokens), "tokens without a block"
            assert seq.num_sealed_blocks * self.block_size <= seq.num_computed_tokens

    def _check_promises(self) -> None:
        assert self.pool.num_available >= self.num_reserved_blocks, "promised more than there is"
