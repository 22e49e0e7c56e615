"""The worker's mirror of the rows it steps: their tokens, block tables and progress, patched by each step's deltas.

The scheduler owns all of this and could send it anew at any time; the mirror exists so that a step need not. It is
numpy arrays with one *slot* a row, so that a batch is gathered from them without a loop over rows. It knows nothing of
tensors, models or the device.

    slot    tokens      [ prompt ............ | output ... newest | unused ]
                          0 .. num_computed-1   are in the arena
                                              num_tokens
            table       [ entry 0 | entry 1 | ... num_blocks | unused ]

Not thread-safe: the device thread alone touches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protos import worker_pb2 as pb
from worker_svc.entries import EntryBounds, max_row_blocks
from worker_svc.errors import MalformedStepError
from worker_svc.sampling import InvalidSamplingError, RowSampling

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class MirrorLimits:
    """What rows may hold."""

    max_num_seqs: int  # rows that a step may compute
    max_model_len: int  # tokens of a row
    block_size: int  # tokens of a block
    vocab_size: int
    entries: EntryBounds
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_blocks(self) -> int:
        """Entries of a row's table."""
        return max_row_blocks(self.max_model_len, self.block_size)


@dataclass(slots=True)
class ScheduledRows:
    """The rows that a step computes, as parallel arrays, and those that it cannot."""

    slots: npt.NDArray[np.int64]
    num_scheduled: npt.NDArray[np.int64]  # tokens
    failed: list[pb.FailedRow] = field(default_factory=list)


class Mirror:
    """Rows by seq_id. Every `apply` either follows the request to its end or raises MalformedStepError."""

    def __init__(self, limits: MirrorLimits) -> None:
        self.limits = limits
        self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self._slot_of: dict[int, int] = {}
        self._free_slots: list[int] = []
        # Untouched pages of these arrays cost no memory: room for the longest sequence is free until it is used.
        self.tokens: IntArray = np.zeros((0, self.limits.max_model_len + 1), dtype=np.int32)
        self.tables: IntArray = np.zeros((0, self.limits.max_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(0, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(0, dtype=np.int64)
        self.num_computed = np.zeros(0, dtype=np.int64)
        self.num_blocks = np.zeros(0, dtype=np.int64)
        self.is_failed = np.zeros(0, dtype=np.bool_)
        self.seq_ids: list[int] = []
        self.seq_epochs: list[int] = []
        self.sequence_idxs: list[int] = []
        self.samplings: list[RowSampling | None] = []
        self._grow(self.limits.max_num_seqs)

    def __len__(self) -> int:
        return len(self._slot_of)

    def slot_of(self, seq_id: int) -> int:
        """Return the slot of a row. Raises MalformedStepError when the mirror does not have it."""
        slot = self._slot_of.get(seq_id)
        if slot is None:
            raise MalformedStepError(f"the step names sequence {seq_id}, which this worker does not have")
        return slot

    def apply(self, request: pb.StepRequest) -> ScheduledRows:
        """Apply a step's row deltas in the contract's order; return the rows to compute, in any order.

        Rows that cannot be computed as sent (a token id outside the vocabulary, a table that is too short) are marked
        failed and listed; rows that failed in an earlier step and were not sent anew are left out silently. Raises
        MalformedStepError for what concerns the step as a whole.
        """
        for seq_id in request.finished_seq_ids:
            self._forget(seq_id)
        failed: list[pb.FailedRow] = []
        slots: list[int] = []
        scheduled: list[int] = []
        for resumed in request.resumed_rows:
            if error := self._why_not_resumed(resumed):
                failed.append(pb.FailedRow(seq_id=resumed.seq_id, seq_epoch=resumed.seq_epoch, error=error))
                continue
            slots.append(self._resume(resumed))
            scheduled.append(resumed.num_scheduled_tokens)
        for new in request.new_rows:
            slot, error = self._add(new)
            if error:
                failed.append(self.fail(slot, error))
            slots.append(slot)
            scheduled.append(new.num_scheduled_tokens)
        if request.patches.seq_ids:
            self._patch(request.patches)
        if request.continued.seq_ids:
            slots += self._continue(request.continued)
            scheduled += request.continued.num_scheduled_tokens or [1] * len(request.continued.seq_ids)
        if len(set(slots)) != len(slots) or len(scheduled) != len(slots):
            raise MalformedStepError("the step names a row twice, or arrays that are parallel differ in length")
        rows = ScheduledRows(np.array(slots, dtype=np.int64), np.array(scheduled, dtype=np.int64), failed)
        return self._drop_failed(rows)

    def advance(self, rows: ScheduledRows) -> None:
        """Count the scheduled tokens as computed."""
        self.num_computed[rows.slots] += rows.num_scheduled

    def append_token(self, slot: int, token_id: int) -> None:
        """Append a sampled token to a row."""
        self.tokens[slot, self.num_tokens[slot]] = token_id
        self.num_tokens[slot] += 1

    def fail(self, slot: int, error: str) -> pb.FailedRow:
        """Mark a row as failed: it is left out of steps until it is sent anew."""
        self.is_failed[slot] = True
        return pb.FailedRow(seq_id=self.seq_ids[slot], seq_epoch=self.seq_epochs[slot], error=error)

    def sampling(self, slot: int) -> RowSampling:
        """Return a row's sampling parameters."""
        sampling = self.samplings[slot]
        assert sampling is not None
        return sampling

    # ---- one kind of delta each

    def _forget(self, seq_id: int) -> None:
        # A row that this worker never got (its step was skipped) may be finished too.
        slot = self._slot_of.pop(seq_id, None)
        if slot is not None:
            self.samplings[slot] = None
            self._free_slots.append(slot)

    def _why_not_resumed(self, row: pb.ResumedRow) -> str:
        slot = self._slot_of.get(row.seq_id)
        known = 0 if slot is None else self.num_tokens[slot]
        return (
            f"resumed with {row.num_tokens} tokens, of which this worker knows {known}"
            if row.num_tokens > known
            else ""
        )

    def _resume(self, row: pb.ResumedRow) -> int:
        slot = self.slot_of(row.seq_id)
        self.num_tokens[slot] = row.num_tokens
        self.num_computed[slot] = row.num_computed_tokens
        self.num_blocks[slot] = 0
        self.seq_epochs[slot] = row.seq_epoch
        self.is_failed[slot] = False
        self._append_entries(slot, row.entries)
        return slot

    def _add(self, row: pb.NewRow) -> tuple[int, str]:
        """Return the row's slot, and what is wrong with the row."""
        slot = self._slot_of.get(row.seq_id)
        if slot is None:
            if not self._free_slots:
                self._grow(2 * len(self.seq_ids))
            slot = self._slot_of[row.seq_id] = self._free_slots.pop()
        self.seq_ids[slot], self.seq_epochs[slot], self.sequence_idxs[slot] = (
            row.seq_id,
            row.seq_epoch,
            row.sequence_idx,
        )
        self.samplings[slot] = None
        self.is_failed[slot] = False
        self.num_blocks[slot] = self.num_tokens[slot] = self.num_computed[slot] = 0
        num_tokens = len(row.token_ids)
        if not 0 < num_tokens <= self.limits.max_model_len:
            return slot, f"{num_tokens} tokens are not between 1 and the limit of {self.limits.max_model_len}"
        token_ids = np.array(row.token_ids, dtype=np.int64)
        if token_ids.max() >= self.limits.vocab_size:
            return slot, f"token id {token_ids.max()} is not below the vocabulary's {self.limits.vocab_size} tokens"
        try:
            self.samplings[slot] = RowSampling.from_message(
                row.sampling, self.limits.eos_token_ids, self.limits.vocab_size
            )
        except InvalidSamplingError as error:
            return slot, str(error)
        self.tokens[slot, :num_tokens] = token_ids
        self.num_tokens[slot], self.num_prompt_tokens[slot] = num_tokens, row.num_prompt_tokens
        self.num_computed[slot] = row.num_computed_tokens
        self._append_entries(slot, row.entries)
        return slot, ""

    def _patch(self, patches: pb.EntryPatches) -> None:
        entries = self.limits.entries.check(patches.entries)
        for seq_id, block_idx, entry in zip(patches.seq_ids, patches.block_idxs, entries, strict=True):
            slot = self.slot_of(seq_id)
            if block_idx >= self.num_blocks[slot]:
                raise MalformedStepError(f"sequence {seq_id} has no block {block_idx} that a patch could change")
            self.tables[slot, block_idx] = entry

    def _continue(self, rows: pb.ContinuedRows) -> list[int]:
        slots = [self.slot_of(seq_id) for seq_id in rows.seq_ids]
        if rows.new_entries:
            begin = 0
            for slot, count in zip(slots, rows.num_new_entries, strict=True):
                if count:
                    self._append_entries(slot, rows.new_entries[begin : begin + count])
                    begin += count
        for seq_id, token_id in zip(rows.token_seq_ids, rows.token_ids, strict=True):
            slot = self.slot_of(seq_id)
            if token_id >= self.limits.vocab_size:
                raise MalformedStepError(f"token id {token_id} is not below {self.limits.vocab_size}")
            # It takes the place of a token that the worker sampled for itself.
            self.num_tokens[slot] = self.num_computed[slot]
            self.append_token(slot, token_id)
        return slots

    def _append_entries(self, slot: int, entries: Sequence[int]) -> None:
        begin, end = self.num_blocks[slot], self.num_blocks[slot] + len(entries)
        if end > self.limits.max_blocks:
            raise MalformedStepError(f"sequence {self.seq_ids[slot]} has {end} blocks, above {self.limits.max_blocks}")
        self.tables[slot, begin:end] = self.limits.entries.check(entries)
        self.num_blocks[slot] = end

    def _drop_failed(self, rows: ScheduledRows) -> ScheduledRows:
        """Mark the rows whose numbers do not fit together; return the others."""
        slots, num_scheduled = rows.slots, rows.num_scheduled
        context_lens = self.num_computed[slots] + num_scheduled
        wrong = (num_scheduled < 1) | (context_lens > self.num_tokens[slots])
        wrong |= context_lens > np.minimum(self.num_blocks[slots] * self.limits.block_size, self.limits.max_model_len)
        wrong &= ~self.is_failed[slots]
        for idx in np.flatnonzero(wrong):
            slot = slots[idx]
            rows.failed.append(
                self.fail(
                    slot,
                    f"{num_scheduled[idx]} tokens are scheduled after {self.num_computed[slot]} of "
                    f"{self.num_tokens[slot]}, with {self.num_blocks[slot]} blocks",
                )
            )
        kept = ~self.is_failed[slots]
        return rows if kept.all() else ScheduledRows(slots[kept], num_scheduled[kept], rows.failed)

    def _grow(self, num_slots: int) -> None:
        """Make room for `num_slots` rows; preempted rows stay, so that there may be more rows than a step computes."""
        old, extra = len(self.seq_ids), num_slots - len(self.seq_ids)

        def grown(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            bigger = np.zeros((num_slots, *array.shape[1:]), dtype=array.dtype)
            bigger[:old] = array
            return bigger

        for name in ("tokens", "tables", "num_tokens", "num_prompt_tokens", "num_computed", "num_blocks", "is_failed"):
            setattr(self, name, grown(getattr(self, name)))
        self.seq_ids += [0] * extra
        self.seq_epochs += [0] * extra
        self.sequence_idxs += [0] * extra
        self.samplings += [None] * extra
        self._free_slots += range(num_slots - 1, old - 1, -1)
