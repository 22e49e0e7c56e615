"""A worker without a model: it steps rows over a simulated arena and checks that every slot it reads is right.

A slot's contents stand for the KV of a token, which depends on all tokens before it: they are a fingerprint of the
prefix that ends there. So a wrong block, a missed copy, an early reuse or a stale hit shows at the first read. Formats
keep the fingerprint, but a slab that is written in another format than before loses what it held. A row that fails
spoils what it was to write; who reads that samples a token that no undisturbed run has.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.block_hash import BlockHash
from scheduler_svc.core.types import (
    BlockId,
    Entry,
    FailedRow,
    Format,
    NewRow,
    ResumedRow,
    SampledRows,
    Seal,
    SeqId,
    StepPlan,
    StepResult,
    StepStatus,
)
from tests.scheduler.core.fake_model import SPOILT, BeamSampling, Top, fingerprint, next_token, top_of

POISON_SEED = 666  # a worker that computes a row with it dies


class WorkerDiedError(Exception):
    """The worker computed what no worker survives."""


@dataclass
class Row:
    token_ids: list[int]
    entries: list[Entry]
    num_computed_tokens: int
    num_scheduled_tokens: int
    seq_epoch: int
    sampling: int | BeamSampling  # a seed, or what a beam search needs
    sequence_idx: int


@dataclass
class FakeWorker:
    block_size: int
    rows: dict[SeqId, Row] = field(default_factory=dict)
    slots: dict[tuple[BlockId, int], int] = field(default_factory=dict)
    slab_formats: dict[int, Format] = field(default_factory=dict)
    sealed: dict[BlockHash, int | None] = field(default_factory=dict)  # what each hash stands for
    seals: dict[Entry, Seal] = field(default_factory=dict)  # of blocks that were not written since
    failed_seq_ids: set[SeqId] = field(default_factory=set)  # rows that are skipped until they are sent anew
    num_copies: int = 0
    num_requantized: int = 0
    is_skipping: bool = False

    def fence(self) -> list[Seal]:
        """Forget all rows for a new epoch, and return the manifest."""
        self.rows.clear()
        self.failed_seq_ids.clear()
        self.is_skipping = False
        return list(self.seals.values())

    def take_arena(self, other: "FakeWorker") -> None:
        """Hold what another worker holds."""
        self.slots, self.slab_formats = dict(other.slots), dict(other.slab_formats)

    def fill(self, entries: Iterable[Entry]) -> None:
        """Hold something in these blocks."""
        for entry in entries:
            for offset in range(self.block_size):
                self._write(entry, offset, entry)

    def run(self, plan: StepPlan, *, fails: bool = False, failing_row_idx: int | None = None) -> StepResult:
        """Run a step as a real worker does.

        `fails`: as one whose forward breaks half way; `failing_row_idx`: as one that cannot compute that row, counted
        round from the first. Raises WorkerDiedError where a row is poison.
        """
        if plan.restart:
            self.fence()
        if self.is_skipping:
            self._record_seals(plan)
            return StepResult(plan.step_id, StepStatus.SKIPPED)
        scheduled = self._update_mirror(plan)
        self._record_seals(plan)
        self._run_ops(plan, scheduled)
        if any(self.rows[seq_id].sampling == POISON_SEED for seq_id in scheduled):
            raise WorkerDiedError
        failed_rows = []
        if failing_row_idx is not None and scheduled:
            failed_rows.append(self._fail_row(scheduled.pop(failing_row_idx % len(scheduled))))
        if fails:
            self.is_skipping = True
            for seq_id in scheduled[: len(scheduled) // 2]:
                self._forward(self.rows[seq_id])
            return StepResult(plan.step_id, StepStatus.FAILED, error="device on fire")
        tops: dict[SeqId, Top | None] = {}
        for seq_id in scheduled:
            row = self.rows[seq_id]
            prefix = self._forward(row)
            if row.num_computed_tokens == len(row.token_ids):
                tops[seq_id] = self._sample(row, prefix)
        rows = [self.rows[seq_id] for seq_id in tops]
        return StepResult(
            plan.step_id,
            sampled=SampledRows(
                list(tops),
                [row.seq_epoch for row in rows],
                [row.token_ids[-1] for row in rows],
                logprobs=[0.0 if top is None else top for top in tops.values()] if any(tops.values()) else (),
            ),
            failed_rows=failed_rows,
        )

    def _fail_row(self, seq_id: SeqId) -> FailedRow:
        row = self.rows[seq_id]
        self._forward(row, fails=True)
        self.failed_seq_ids.add(seq_id)
        return FailedRow(seq_id, row.seq_epoch, "not a number")

    def _sample(self, row: Row, prefix: int) -> Top | None:
        if isinstance(row.sampling, int):
            row.token_ids.append(next_token(prefix, row.sampling, row.sequence_idx))
            return None
        top = top_of(prefix, row.sampling.seed, row.sampling.num_top)
        row.token_ids.append(top.top_token_ids[0])
        return top

    def _update_mirror(self, plan: StepPlan) -> list[SeqId]:
        for seq_id in plan.finished_seq_ids:
            del self.rows[seq_id]
            self.failed_seq_ids.discard(seq_id)
        for resumed in plan.resumed_rows:
            self._resume(resumed)
        for new in plan.new_rows:
            self._add(new)
        for patch in plan.patches:
            self.rows[patch.seq_id].entries[patch.block_idx] = patch.entry
        for continued in plan.continued_rows:
            row = self.rows[continued.seq_id]
            row.entries += continued.new_entries
            row.num_scheduled_tokens = continued.num_scheduled_tokens
        for seq_id, token_id in plan.picked_tokens:
            row = self.rows[seq_id]
            assert any(continued.seq_id == seq_id for continued in plan.continued_rows)
            if seq_id in self.failed_seq_ids:
                continue
            assert len(row.token_ids) == row.num_computed_tokens + 1
            row.token_ids[-1] = token_id
        for seq_id in plan.settled_seq_ids:
            self.rows[seq_id].num_scheduled_tokens = 1
        groups = (plan.resumed_rows, plan.new_rows, plan.continued_rows)
        scheduled = [*(row.seq_id for group in groups for row in group), *plan.settled_seq_ids]
        assert len(set(scheduled)) == len(scheduled), "a row is scheduled twice"
        return [seq_id for seq_id in scheduled if seq_id not in self.failed_seq_ids]

    def _resume(self, resumed: ResumedRow) -> None:
        row = self.rows[resumed.seq_id]
        self.failed_seq_ids.discard(resumed.seq_id)
        assert len(row.token_ids) >= resumed.num_tokens
        del row.token_ids[resumed.num_tokens :]
        row.entries = list(resumed.entries)
        row.seq_epoch = resumed.seq_epoch
        row.num_computed_tokens, row.num_scheduled_tokens = resumed.num_computed_tokens, resumed.num_scheduled_tokens

    def _add(self, new: NewRow) -> None:
        assert new.seq_id not in self.rows
        assert isinstance(new.sampling, int | BeamSampling)
        self.rows[new.seq_id] = Row(
            list(new.token_ids),
            list(new.entries),
            new.num_computed_tokens,
            new.num_scheduled_tokens,
            new.seq_epoch,
            new.sampling,
            new.sequence_idx,
        )

    def _run_ops(self, plan: StepPlan, scheduled: list[SeqId]) -> None:
        ops = plan.ops
        moved = [*ops.copy, *ops.requantize]
        written = [*ops.zero, *(destination for _, destination in moved)]
        assert len({_block(entry) for entry in written}) == len(written), "a place is written by two operations"
        sources = {_block(source) for source, _ in moved}
        assert not sources & set(map(_block, written)), "a place is read and written by operations"
        assert not sources & {_block(e) for seq_id in scheduled for e in self._written_entries(self.rows[seq_id])}
        for source, destination in ops.copy:
            assert _format(source) is _format(destination), "a copy does not change the format"
        for source, destination in ops.requantize:
            assert _format(source) < _format(destination), "a block was not narrowed"
            assert all(self._read(source, offset) is not None for offset in range(self.block_size)), "it is not full"
        # Read all before anything is written: the order of a step's operations is the worker's affair.
        contents = [[self._read(source, offset) for offset in range(self.block_size)] for source, _ in moved]
        for entry in ops.zero:
            for offset in range(self.block_size):
                self._write(entry, offset, None)
        for (_, destination), block in zip(moved, contents, strict=True):
            for offset, content in enumerate(block):
                self._write(destination, offset, content)
        self.num_copies += len(ops.copy)
        self.num_requantized += len(ops.requantize)

    def _record_seals(self, plan: StepPlan) -> None:
        for seal in plan.seals:
            contents = [self._read(seal.entry, offset) for offset in range(self.block_size)]
            assert None not in contents, "a block is sealed that is not full"
            assert SPOILT not in contents, "a block is sealed that a failed row wrote"
            sealed = self.sealed.setdefault(seal.block_hash, contents[-1])
            assert sealed == contents[-1], "a hash stands for different contents"
            self.seals[seal.entry] = seal

    def _read(self, entry: Entry, offset: int) -> int | None:
        if self.slab_formats.get(_block(entry) // 256) is not _format(entry):
            return None
        return self.slots.get((_block(entry), offset))

    def _write(self, entry: Entry, offset: int, content: int | None) -> None:
        slab_idx = _block(entry) // 256
        if self.slab_formats.get(slab_idx) is not _format(entry):
            self.slots = {slot: value for slot, value in self.slots.items() if slot[0] // 256 != slab_idx}
            self.seals = {other: seal for other, seal in self.seals.items() if _block(other) // 256 != slab_idx}
            self.slab_formats[slab_idx] = _format(entry)
        self.seals.pop(entry, None)
        if content is None:
            self.slots.pop((_block(entry), offset), None)
        else:
            self.slots[_block(entry), offset] = content

    def _written_entries(self, row: Row) -> set[Entry]:
        first, last = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens - 1
        return set(row.entries[first // self.block_size : last // self.block_size + 1])

    def _forward(self, row: Row, *, fails: bool = False) -> int:
        """Write the scheduled tokens, check all that attention would read; return the fingerprint at the last one.

        Where the row fails, or reads what one that failed was to write, it spoils what it writes.
        """
        end = row.num_computed_tokens + row.num_scheduled_tokens
        assert row.num_scheduled_tokens > 0
        assert end <= len(row.token_ids), "tokens are scheduled that the worker does not have"
        prefix = 0
        for position in range(end):
            prefix = fingerprint(prefix, row.token_ids[position])
            entry, offset = row.entries[position // self.block_size], position % self.block_size
            if position >= row.num_computed_tokens:
                assert _format(entry) is Format.NATIVE, "new tokens are written to native blocks"
                self._write(entry, offset, SPOILT if fails else prefix)
            content = self._read(entry, offset)
            fails = fails or content == SPOILT
            assert fails or content == prefix, f"entry {entry} does not hold position {position}"
        row.num_computed_tokens = end
        return SPOILT if fails else prefix


def _block(entry: Entry) -> BlockId:
    return BlockId(entry // 8)


def _format(entry: Entry) -> Format:
    return Format(entry % 8)
