"""The block tables of a lane whose blocks are kept in several formats.

New tokens are written to native blocks. Once a block is full, age narrows it: an operation of a later step writes it
anew in a narrower format, at another place, and the tables that have it are patched.

    step k      fills block 4 of a sequence (policy native:1,int8)
    step k+1    before its forward: block 3, native at place 7, is written as int8 at place 512
                place 7 stays in quarantine until step k+1 has been applied

A block that sequences share is narrowed when the last of them allows it, and never widened again.

A prompt's native places come back only after its blocks were narrowed, so nothing is promised block by block here: rows
take what there is, wait while places are in quarantine, and preempt when nothing else helps. Admission looks ahead
instead: all blocks, promised ones in the format that their age will give them, must fit into the slabs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import NativeArena, SlabArena
from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.kv_manager import Growth, KVManager, Relocation
from scheduler_svc.core.precision import PrecisionError, PrecisionPolicy, name_of
from scheduler_svc.core.pressure import PressureLadder
from scheduler_svc.core.relocation import Relocator
from scheduler_svc.core.sequence import Seq
from scheduler_svc.core.types import Counters, Format, LaneSpec, StepId


@dataclass(slots=True, kw_only=True)
class MixedKVManager(KVManager):
    """Block tables over slabs that formats share."""

    arena: SlabArena  # that of the pool
    max_chunk_blocks: int  # native blocks that a step's tokens fill
    relocator: Relocator = field(init=False)
    ladder: PressureLadder = field(init=False)
    promised: list[int] = field(default_factory=lambda: [0] * len(Format))  # blocks reserved, by format
    _due: dict[Seq, None] = field(default_factory=dict)  # sequences with a block that became full
    _unawaited: dict[Block, None] = field(default_factory=dict)  # shared blocks that a sequence gave up

    def __post_init__(self) -> None:
        self.relocator = Relocator(self.pool, self.relocations)
        self.ladder = PressureLadder(self.arena, self.pool, self.relocator, self.block_size)

    def num_native_blocks(self, seq: Seq) -> float:
        """Return the room that all known tokens of `seq` take; see KVManager.num_native_blocks."""
        capacities = self.arena.capacities
        wanted = self._promise(seq, 0, self.num_blocks_for(len(seq.token_ids)))
        return sum(wanted[fmt] * capacities[Format.NATIVE] / capacity for fmt, capacity in capacities.items())

    def can_admit(self, seq: Seq, hits: Sequence[Block], watermark_blocks: int) -> bool:
        """Return whether all known tokens of `seq` fit beside what is there and promised, with `watermark_blocks` left.

        Every block counts in the format that it is in, or that it will have when the prompt is computed; native room is
        left for the chunks of three steps, which come back only after the step that narrows them. Cached blocks do not
        count. A sequence that has the lane for itself may try.
        """
        if not any(self.pool.num_referenced) and not any(self.promised):
            return True
        wanted = self._promise(seq, len(hits), self.num_blocks_for(len(seq.token_ids)))
        num_unwritten = sum(self.promised) + sum(wanted)
        for block in hits:
            wanted[block.fmt] += self.pool.is_idle(block)
        wanted[Format.NATIVE] += watermark_blocks + min(3 * self.max_chunk_blocks, num_unwritten)
        num_slabs = sum(
            -(-(self.pool.num_referenced[fmt] + self.promised[fmt] + wanted[fmt]) // capacity)
            for fmt, capacity in self.arena.capacities.items()
        )
        return num_slabs + self.arena.reserve_slabs <= self.arena.num_slabs

    def admit(self, seq: Seq, hits: Sequence[Block]) -> None:
        """Give `seq` its hits, and promise it blocks for the rest of its known tokens."""
        KVManager.admit(self, seq, hits)
        self._count_promise(seq, 1)
        self.ladder.add(seq)
        for block_idx, block in enumerate(hits):
            self.relocator.hold(block, block_idx, seq)

    def num_tokens_with_room(self, seq: Seq, num_tokens: int) -> int:
        """Return for how many of the next `num_tokens` of a prompt there are native places now."""
        num_missing = self.num_blocks_for(seq.num_computed_tokens + num_tokens) - len(seq.table)
        num_short = max(0, num_missing - self.ladder.find_room(num_missing))
        num_blocks = len(seq.table) + num_missing - num_short
        return min(num_tokens, num_blocks * self.block_size - seq.num_computed_tokens)

    @property
    def is_row_starving(self) -> bool:
        """Whether a row found no room since blocks were put in other places last."""
        return self.ladder.num_starved > 0

    def is_room_coming(self, seq: Seq) -> bool:
        """Return whether waiting helps."""
        return self.ladder.is_room_coming()

    def grow(self, seq: Seq, num_tokens: int) -> Growth | None:
        """Make room for the next `num_tokens` of `seq`; see KVManager.grow."""
        _, shared = self._missing(seq, num_tokens)
        if shared is not None and self.relocator.is_relocated_now(shared):
            return None  # what this step moves it cannot copy too
        growth = KVManager.grow(self, seq, num_tokens)
        if growth is None:
            return None
        if growth.copied:
            block_idx, shared, copy = growth.copied
            self._let_go(shared, seq)
            self.relocator.hold(copy, block_idx, seq)
        for block_idx in range(len(seq.table) - len(growth.new_entries), len(seq.table)):
            self.relocator.hold(seq.table[block_idx], block_idx, seq)
        if seq.num_computed_tokens % self.block_size + num_tokens >= self.block_size:
            self._due[seq] = None
        return growth

    def fork(self, parent: Seq, child: Seq) -> None:
        """Share the parent's blocks with `child`; see KVManager.fork."""
        KVManager.fork(self, parent, child)
        self.ladder.add(child)
        for block_idx, block in enumerate(child.table):
            self.relocator.hold(block, block_idx, child)

    def release(self, seq: Seq, last_step_id: StepId | None) -> None:
        """Give back all that `seq` holds; see KVManager.release."""
        self._count_promise(seq, -1)
        self.ladder.remove(seq)
        KVManager.release(self, seq, last_step_id)
        for block in seq.table:
            self._let_go(block, seq)
        self._due.pop(seq, None)

    def relocate(self, step_id: StepId, counters: Counters) -> None:
        """Narrow the blocks that are old enough, and make room where it is short, by operations of the step."""
        self.relocator.step_id = step_id
        num_before = len(self.relocations)
        self._narrow_due()
        counters.demoted_blocks += len(self.relocations) - num_before
        self.ladder.relieve(min(sum(self.promised), 2 * self.max_chunk_blocks), counters)

    def end_step(self, step_id: StepId, relocations: Sequence[Relocation]) -> None:
        """Seal at the worker what a step put in other places, now that it has been applied."""
        for block in self.relocator.end_step(step_id, relocations):
            assert block.block_hash is not None
            KVManager._seal_at_worker(self, block, block.block_hash)
            self.new_hashes[block.block_hash] = self._encoding(self.pool.best_copy(block).fmt)

    def forget(self, relocations: Sequence[Relocation]) -> None:
        """Drop what relocated blocks hold: their steps failed. Nobody references them."""
        self.relocator.forget(relocations)

    def holders_of(self, block: Block) -> Iterable[Seq]:
        """Return the sequences that have the block in their tables."""
        return self.relocator.holders.get(block, ())

    def _narrow_due(self) -> None:
        """Narrow what age, or the end of a sequence that shared it, has made due since the last step was planned."""
        due, self._due = self._due, {}
        for seq in due:
            if not self._narrow_aged(seq):
                self._due[seq] = None
        unawaited, self._unawaited = self._unawaited, {}
        for block in unawaited:
            if block in self.relocator.holders and not self._narrow(block):
                self._unawaited[block] = None

    def _narrow_aged(self, seq: Seq) -> bool:
        """Narrow the blocks of `seq` that crossed a border of its policy. False: there was no place for one."""
        num_full = seq.num_computed_tokens // self.block_size
        # The narrowest tier first: a block that is past two borders is quantized once.
        for tier in reversed(seq.precision.narrowing):
            first_block_idx = max(1, seq.num_aged_blocks - tier.from_age_blocks)
            for block in seq.table[first_block_idx : max(0, num_full - tier.from_age_blocks)]:
                if block.fmt < tier.fmt:
                    if not self._narrow(block):
                        return False
                    block.is_awaited |= block.fmt < tier.fmt
        seq.num_aged_blocks = num_full
        return True

    def _narrow(self, block: Block) -> bool:
        """Narrow a block as far as all that hold it allow. False: there was no place for it."""
        fmt = self._allowed_format(block)
        return fmt <= block.fmt or self.relocator.relocate(block, fmt)

    def _allowed_format(self, block: Block) -> Format:
        """Return the widest of the formats in which the sequences that hold the block want it."""
        allowed = max(self.arena.capacities)
        for seq in self.relocator.holders[block]:
            wanted = seq.precision.format_of(block.block_idx, seq.num_computed_tokens // self.block_size)
            allowed = min(allowed, wanted)
            if allowed <= block.fmt:
                break
        return allowed

    def _hit(self, seq: Seq, block_idx: int, block_hash: BlockHash) -> Block | None:
        """Return the best copy of a block, if `seq` allows its format at the age that the block will have.

        A sequence that starts over takes what pressure may have made of its blocks.
        """
        num_full = len(seq.token_ids) // self.block_size
        if seq.num_output_tokens or seq.seq_epoch:
            narrowest = seq.precision.pressed_format_of(block_idx, num_full)
        else:
            narrowest = seq.precision.format_of(block_idx, num_full)
        return self.pool.find_no_narrower(block_hash, narrowest)

    def _has_room(self, seq: Seq, num_missing: int) -> bool:
        return self.ladder.find_room(num_missing) >= num_missing

    def _take_block(self, seq: Seq) -> Block:
        if seq.num_reserved_blocks:
            self.promised[self._oldest_promise(seq)] -= 1
        return KVManager._take_block(self, seq)

    def _oldest_promise(self, seq: Seq) -> Format:
        """Return the format in which the next block of `seq` was promised."""
        num_tokens = len(seq.token_ids)
        block_idx = self.num_blocks_for(num_tokens) - seq.num_reserved_blocks
        return seq.precision.format_of(block_idx, num_tokens // self.block_size)

    def _promise(self, seq: Seq, first_block_idx: int, end_block_idx: int) -> list[int]:
        return seq.precision.count_formats(first_block_idx, end_block_idx, len(seq.token_ids) // self.block_size)

    def _count_promise(self, seq: Seq, sign: int) -> None:
        end_block_idx = self.num_blocks_for(len(seq.token_ids))
        for fmt, num_blocks in enumerate(self._promise(seq, end_block_idx - seq.num_reserved_blocks, end_block_idx)):
            self.promised[fmt] += sign * num_blocks

    def _seal_at_worker(self, block: Block, block_hash: BlockHash) -> None:
        # Of a block on its way `end_step` does it, once the block's new place has been written.
        if not self.relocator.is_on_its_way(block):
            KVManager._seal_at_worker(self, block, block_hash)

    def _let_go(self, block: Block, seq: Seq) -> None:
        if self.relocator.let_go(block, seq) and block.is_awaited:
            self._unawaited[block] = None

    def check_integrity(self, seqs: Sequence[Seq]) -> None:
        """Raise AssertionError unless pool, tables, promises and formats agree. `seqs`: all rows of the lane."""
        KVManager.check_integrity(self, seqs)
        self.relocator.check_integrity(seqs)
        promised = [0] * len(Format)
        for seq in seqs:
            num_full = seq.num_computed_tokens // self.block_size
            for block_idx, block in enumerate(seq.table):
                assert block.fmt is Format.NATIVE or 0 < block_idx < num_full, "a block that is written is not native"
                assert block.fmt <= seq.precision.floor, "a block below the floor"
            end_block_idx = self.num_blocks_for(len(seq.token_ids))
            counts = self._promise(seq, end_block_idx - seq.num_reserved_blocks, end_block_idx)
            promised = [have + more for have, more in zip(promised, counts, strict=True)]
        assert promised == self.promised, "promises"
        assert self._due.keys() <= set(seqs), "a sequence that is gone has blocks to narrow"

    def _check_promises(self) -> None:
        """Nothing is promised block by block."""


def stays_native(spec: LaneSpec, precision: PrecisionPolicy) -> bool:
    """Return whether a lane keeps all its blocks native though the policy would narrow them.

    It does where the slabs that are kept free for narrowing would be a large part of a small pool.
    """
    return len(precision.formats) > 1 and spec.num_slabs < 2 * len(precision.formats) + 2


def max_seq_tokens(spec: LaneSpec, precision: PrecisionPolicy) -> dict[Format, int]:
    """Return the tokens of the longest sequence that a worker's whole pool holds, by the sequence's floor.

    All its blocks but the first and the last are at the floor then. Narrowing takes room: a slab of each format is left
    to it. Raises PrecisionError when the worker lacks a format that the policy uses.
    """
    for fmt in precision.formats:
        if fmt not in spec.capacities:
            raise PrecisionError(
                f"the worker has no {name_of(fmt)} KV blocks, which the precision policy uses (--kv-formats)"
            )
    if not _has_slabs(spec, precision):
        return dict.fromkeys(precision.formats, spec.num_blocks * spec.block_size)
    num_slabs = spec.num_blocks // spec.blocks_per_slab - (len(precision.formats) - 1)
    limits = {}
    for num_wider, floor in enumerate(precision.formats):
        num_native = 2 if num_wider else 0  # beside those at the floor
        num_wide_slabs = num_wider + -(-num_native // spec.blocks_per_slab)
        num_blocks = num_native + max(0, num_slabs - num_wide_slabs) * spec.capacities[floor]
        limits[floor] = num_blocks * spec.block_size
    return limits


def _has_slabs(spec: LaneSpec, precision: PrecisionPolicy) -> bool:
    return len(precision.formats) > 1 and not stays_native(spec, precision)


def make_kv_manager(
    spec: LaneSpec, precision: PrecisionPolicy, max_num_batched_tokens: int, enable_prefix_caching: bool
) -> KVManager:
    """Return the manager of a new lane's blocks.

    Raises PrecisionError when the worker lacks a format that the policy uses.
    """
    limits = max_seq_tokens(spec, precision)
    if not _has_slabs(spec, precision):
        pool = BlockPool(NativeArena(spec.num_blocks, spec.blocks_per_slab))
        return KVManager(pool, spec.block_size, enable_prefix_caching, spec.recipe_versions, limits)
    arena = SlabArena(spec.num_blocks // spec.blocks_per_slab, {fmt: spec.capacities[fmt] for fmt in precision.formats})
    return MixedKVManager(
        BlockPool(arena),
        spec.block_size,
        enable_prefix_caching,
        spec.recipe_versions,
        limits,
        arena=arena,
        max_chunk_blocks=-(-max_num_batched_tokens // spec.block_size),
    )
