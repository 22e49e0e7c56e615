"""A lane: the scheduler's state for one worker, and the step that is being put together for it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.arena import format_of
from scheduler_svc.core.block_pool import Block
from scheduler_svc.core.kv_manager import Growth, KVManager, Relocation
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.types import (
    BlockOps,
    ContinuedRow,
    Entry,
    EntryPatch,
    LaneId,
    LaneStats,
    NewRow,
    ResumedRow,
    SeqId,
    StepId,
    StepPlan,
)

MAX_STEPS_IN_FLIGHT = 2
_NO_STEP = StepId(0)


# A row of a planned step that is not settled: the sequence, its epoch, the step's tokens and new entries, its computed
# tokens after it.
PlannedRow = tuple[Seq, int, int, Sequence[Entry], int]


@dataclass(slots=True)
class Draft:
    """A step being planned. Rows can leave it again, with their operations, until it is done."""

    budget_tokens: int
    rows: list[PlannedRow] = field(default_factory=list)
    settled: list[Seq] = field(default_factory=list)  # rows that take one token and ask nothing of their table
    growths: dict[SeqId, Growth] = field(default_factory=dict)  # only of rows whose table asks for operations
    picked: dict[SeqId, int] = field(default_factory=dict)  # the tokens of beams, which the worker does not know
    preempted: set[SeqId] = field(default_factory=set)
    num_chunk_tokens: int = 0  # see PlannedStep

    @property
    def is_empty(self) -> bool:
        """Whether no row is in."""
        return not self.rows and not self.settled

    def add_row(self, seq: Seq, num_tokens: int, growth: Growth) -> None:
        """Add the next `num_tokens` of `seq`, which from now on count as computed."""
        seq.num_computed_tokens += num_tokens
        self.budget_tokens -= num_tokens
        if growth.zero or growth.copied:
            self.growths[seq.seq_id] = growth
        self.rows.append((seq, seq.seq_epoch, num_tokens, growth.new_entries, seq.num_computed_tokens))

    def add_settled_decodes(self, seqs: Iterable[Seq]) -> list[Seq]:
        """Add one token of each sequence that asks nothing of its table; return the others."""
        settled: list[Seq] = []
        unsettled: list[Seq] = []
        for seq in seqs:
            if seq.num_computed_tokens < seq.settled_until_tokens:
                seq.num_computed_tokens += 1
                settled.append(seq)
            else:
                unsettled.append(seq)
        self.settled += settled
        self.budget_tokens -= len(settled)
        return unsettled

    def remove_row(self, seq: Seq) -> list[Block]:
        """Take `seq` out, if it is in, and return the shared blocks whose copies are off."""
        if seq in self.settled:
            self.settled.remove(seq)
            self.budget_tokens += 1
        self.budget_tokens += sum(num_tokens for other, _, num_tokens, _, _ in self.rows if other is seq)
        self.rows = [row for row in self.rows if row[0] is not seq]
        self.picked.pop(seq.seq_id, None)
        growth = self.growths.pop(seq.seq_id, None)
        return [growth.copied[1]] if growth and growth.copied else []

    def copied_blocks(self) -> list[Block]:
        """Return the shared blocks that the step's copies read."""
        return [growth.copied[1] for growth in self.growths.values() if growth.copied]


@dataclass(slots=True)
class PlannedStep:
    """A step in flight."""

    step_id: StepId
    rows: list[PlannedRow]
    settled: list[Seq]
    settled_epochs: list[int]
    relocations: list[Relocation]
    num_chunk_tokens: int  # of `prefilling` rows; those that left the draft again too

    def live_seq_ids(self) -> set[SeqId]:
        """Return the sequences for which the step still counts."""
        settled = zip(self.settled, self.settled_epochs, strict=True)
        live = {seq.seq_id for seq, seq_epoch in settled if seq_epoch == seq.seq_epoch}
        live.update(seq.seq_id for seq, seq_epoch, *_ in self.rows if seq_epoch == seq.seq_epoch)
        return live


@dataclass(slots=True, eq=False)
class Lane:
    """One worker's rows, KV and steps in flight."""

    lane_id: LaneId
    kv: KVManager
    max_num_seqs: int
    max_num_batched_tokens: int
    decoding: dict[SeqId, Seq] = field(default_factory=dict)  # rows whose known tokens are all planned
    prefilling: dict[SeqId, Seq] = field(default_factory=dict)
    beams: dict[SeqId, Seq] = field(default_factory=dict)  # rows of beam searches that have computed their prompt
    searches: dict[Job, None] = field(default_factory=dict)  # beam searches that have rows here
    in_flight: deque[PlannedStep] = field(default_factory=deque)
    finished_seq_ids: list[SeqId] = field(default_factory=list)  # rows that the worker still has
    restart: bool = False  # the worker skips steps until one is so marked
    is_batch_open: bool = True  # static batching: rows may still join
    num_joined: int = 0  # static batching: rows that the batch has had
    is_draining: bool = False  # its worker is about to leave: no row joins any more
    is_kept: bool = False  # for a sequence that does not fit yet, when it was planned last
    last_step_id: StepId = _NO_STEP
    # Kept as rows come and go, since a router looks at every lane:
    num_rows: int = 0  # sequences that run here
    num_uncomputed_tokens: int = 0  # known tokens of rows in `prefilling` that no step computes yet
    num_planned_tokens: int = 0  # of prompts, that the step being planned and those in flight compute

    @property
    def num_free_rows(self) -> int:
        """Rows that may be taken: a beam search keeps those of the beams that it may still have."""
        return self.max_num_seqs - self.num_rows - sum([len(job.unforked) for job in self.searches])

    @property
    def is_drained(self) -> bool:
        """Whether it drains, and has no row any more and no step in flight: nobody misses it."""
        return self.is_draining and not self.num_rows and not self.in_flight

    @property
    def next_step_id(self) -> StepId:
        """The step that is planned next."""
        return StepId(self.last_step_id + 1)

    def rows(self) -> list[Seq]:
        """Return the sequences that run here."""
        return [*self.decoding.values(), *self.prefilling.values(), *self.beams.values()]

    def could_serve(self, seq: Seq) -> bool:
        """Return whether the lane would have room for `seq` if nothing else ran here."""
        return self.kv.can_hold(len(seq.token_ids), seq.precision.floor) and seq.num_wanted_rows <= self.max_num_seqs

    def can_plan(self) -> bool:
        """Return whether another step may be planned before one in flight has been applied."""
        return len(self.in_flight) < MAX_STEPS_IN_FLIGHT

    def quarantine_end(self) -> StepId | None:
        """Return the last step that may name places given up now; until it is applied they are not reused. None: none.

        It is the step being planned, where that has relocations.
        """
        if self.kv.relocations:
            return self.next_step_id
        return self.last_step_id if self.in_flight else None

    def begin(self, seq: Seq, hits: Sequence[Block]) -> None:
        """Make a waiting sequence a row that starts with these sealed blocks, and has the rest to compute."""
        seq.state, seq.lane_id = SeqState.RUNNING, self.lane_id
        self.kv.admit(seq, hits)
        self.prefilling[seq.seq_id] = seq
        self.num_rows += 1
        self.num_joined += 1
        self.num_uncomputed_tokens += len(seq.token_ids) - seq.num_computed_tokens
        if seq.job.search is not None:
            self.searches[seq.job] = None

    def fork(self, parent: Seq, child: Seq) -> None:
        """Make an unforked sequence a row that shares what its parent has computed."""
        self.kv.fork(parent, child)
        child.state, child.lane_id = SeqState.RUNNING, self.lane_id
        (self.decoding if child.job.search is None else self.beams)[child.seq_id] = child
        self.num_rows += 1
        self.num_joined += 1

    def remove(self, seq: Seq) -> None:
        """Take a row out; its blocks wait for the steps in flight. `seq` is as it was before it ran."""
        if self.prefilling.pop(seq.seq_id, None) is not None:
            self.num_uncomputed_tokens -= len(seq.token_ids) - seq.num_computed_tokens
        self.decoding.pop(seq.seq_id, None)
        self.beams.pop(seq.seq_id, None)
        self.num_rows -= 1
        self.kv.release(seq, self.quarantine_end())
        seq.leave_lane()
        if seq.job.search is not None and all(other.lane_id != self.lane_id for other in seq.job.seqs):
            self.searches.pop(seq.job, None)

    def forget_row(self, seq: Seq) -> None:
        """Have the next step tell the worker to forget the row."""
        if seq.worker_lane_id == self.lane_id:
            self.finished_seq_ids.append(seq.seq_id)
            seq.worker_lane_id = None

    def plan_chunk(self, draft: Draft, seq: Seq, num_tokens: int, growth: Growth) -> None:
        """Have the draft compute the next known tokens of a row in `prefilling`."""
        draft.add_row(seq, num_tokens, growth)
        draft.num_chunk_tokens += num_tokens
        self.num_planned_tokens += num_tokens
        self.num_uncomputed_tokens -= num_tokens

    def discard(self, draft: Draft) -> None:
        """Forget a draft that does not become a step."""
        self.num_planned_tokens -= draft.num_chunk_tokens

    def has_news(self) -> bool:
        """Return whether the worker should hear something even when no row runs."""
        return bool(self.finished_seq_ids or self.kv.new_seals or self.restart)

    def finish(self, draft: Draft) -> StepPlan:
        """Make the draft the next step: it is in flight from now on."""
        self.last_step_id = self.next_step_id
        relocations = self.kv.relocations.copy()
        patches = self._relocated_entries() if relocations else []  # while it is known which rows the worker has
        new_rows: list[NewRow] = []
        resumed_rows: list[ResumedRow] = []
        continued_rows: list[ContinuedRow] = []
        for row in draft.rows:
            seq, seq_epoch, num_tokens, new_entries, _ = row
            if seq.worker_epoch == seq_epoch and seq.worker_lane_id == self.lane_id:
                continued_rows.append(ContinuedRow(seq.seq_id, num_tokens, new_entries))
                continue
            if seq.worker_lane_id == self.lane_id:
                resumed_rows.append(_resumed_row(row))
            else:
                new_rows.append(_new_row(row))
            seq.worker_lane_id, seq.worker_epoch = self.lane_id, seq_epoch
        plan = StepPlan(
            step_id=self.last_step_id,
            restart=self.restart,
            finished_seq_ids=self.finished_seq_ids,
            resumed_rows=resumed_rows,
            new_rows=new_rows,
            continued_rows=continued_rows,
            settled_seq_ids=[seq.seq_id for seq in draft.settled],
            picked_tokens=_picked_tokens(draft, continued_rows),
            patches=patches + _patches(draft, continued_rows),
            seals=self.kv.new_seals,
            ops=_block_ops(draft, relocations),
        )
        epochs = [seq.seq_epoch for seq in draft.settled]
        num_chunk_tokens = draft.num_chunk_tokens
        step = PlannedStep(self.last_step_id, draft.rows, draft.settled, epochs, relocations, num_chunk_tokens)
        self.in_flight.append(step)
        self.kv.pool.release(draft.copied_blocks(), self.last_step_id)
        self.finished_seq_ids, self.kv.new_seals, self.restart = [], [], False
        self.kv.relocations.clear()
        return plan

    def end_step(self) -> PlannedStep:
        """Take out the oldest step in flight: it has been answered."""
        step = self.in_flight.popleft()
        self.num_planned_tokens -= step.num_chunk_tokens
        return step

    def _relocated_entries(self) -> list[EntryPatch]:
        """Return what relocations change in tables that the worker has, also of rows that sit the step out."""
        return [
            EntryPatch(seq.seq_id, relocation.block.block_idx, relocation.destination)
            for relocation in self.kv.relocations
            for seq in self.kv.holders_of(relocation.block)
            if seq.worker_lane_id == self.lane_id and seq.worker_epoch == seq.seq_epoch
        ]

    def stats(self) -> LaneStats:
        """Return the lane's figures."""
        pool, block_size = self.kv.pool, self.kv.block_size
        num_quarantined = pool.arena.in_native_blocks(pool.num_quarantined_of)
        decoding = [*self.decoding.values(), *self.beams.values()]
        num_used = pool.num_blank + num_quarantined + pool.arena.in_native_blocks(pool.num_referenced)
        return LaneStats(
            lane_id=self.lane_id,
            num_running_seqs=self.num_rows,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_blank,
            num_cached_blocks=max(0, pool.num_blocks - num_used),
            num_quarantined_blocks=num_quarantined,
            num_referenced_blocks=tuple(pool.num_referenced),
            num_allocated_slots=sum(len(seq.table) * block_size for seq in decoding),
            num_used_slots=sum(seq.num_computed_tokens for seq in decoding),
            num_steps_in_flight=len(self.in_flight),
            is_draining=self.is_draining,
        )


def _new_row(row: PlannedRow) -> NewRow:
    seq, seq_epoch, num_tokens, _, num_computed_tokens = row
    return NewRow(
        seq_id=seq.seq_id,
        seq_epoch=seq_epoch,
        token_ids=tuple(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        entries=[block.entry for block in seq.table],
        num_computed_tokens=num_computed_tokens - num_tokens,
        num_scheduled_tokens=num_tokens,
        sequence_idx=seq.sequence_idx,
        sampling=seq.job.request.sampling,
    )


def _resumed_row(row: PlannedRow) -> ResumedRow:
    seq, seq_epoch, num_tokens, _, num_computed_tokens = row
    return ResumedRow(
        seq_id=seq.seq_id,
        seq_epoch=seq_epoch,
        num_tokens=len(seq.token_ids),
        entries=[block.entry for block in seq.table],
        num_computed_tokens=num_computed_tokens - num_tokens,
        num_scheduled_tokens=num_tokens,
    )


def _patches(draft: Draft, continued_rows: Sequence[ContinuedRow]) -> list[EntryPatch]:
    """Return what copies change in tables that the worker has; new and resumed rows carry their whole table."""
    if not draft.growths:
        return []
    continued = {row.seq_id for row in continued_rows}
    return [
        EntryPatch(seq_id, growth.copied[0], growth.copied[2].entry)
        for seq_id, growth in draft.growths.items()
        if growth.copied and seq_id in continued
    ]


def _picked_tokens(draft: Draft, continued_rows: Sequence[ContinuedRow]) -> list[tuple[SeqId, int]]:
    """Return the tokens that the worker must be told; new rows carry all of theirs."""
    if not draft.picked:
        return []
    return [(row.seq_id, draft.picked[row.seq_id]) for row in continued_rows if row.seq_id in draft.picked]


def _block_ops(draft: Draft, relocations: Sequence[Relocation]) -> BlockOps:
    growths = draft.growths.values()
    copies = [(growth.copied[1].entry, growth.copied[2].entry) for growth in growths if growth.copied]
    requantized: list[tuple[Entry, Entry]] = []
    for _, source, destination in relocations:
        is_move = format_of(source) is format_of(destination)
        (copies if is_move else requantized).append((source, destination))
    return BlockOps([entry for growth in growths for entry in growth.zero], copies, requantized)
