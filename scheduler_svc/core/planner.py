"""How a lane's next step is put together: running rows first, then waiting sequences, all in one token budget.

blocks             before all else, what is put in another place or format
decoding rows      one token each; where blocks are short, the newest row is preempted
beams              likewise, the token that their search picked: after the result that it picked it by
prefilling rows    the next chunk of their prompt, as far as there are places; all blocks were promised at admission
waiting sequences  while rows, tokens and blocks are left, and nobody was preempted for this step
"""

from collections.abc import Iterator, Sequence

from scheduler_svc.core.beams import start_over
from scheduler_svc.core.block_pool import Block
from scheduler_svc.core.ends import end_outgrown
from scheduler_svc.core.fairness import charge, goes_before, pick_victim, prompt_order, spare, stop
from scheduler_svc.core.kv_manager import Growth
from scheduler_svc.core.lane import Draft, Lane
from scheduler_svc.core.policy import SchedulingPolicy, forget_passes, keeps_lane, pass_over, watermark_blocks
from scheduler_svc.core.sequence import Seq, Tenant
from scheduler_svc.core.state import State
from scheduler_svc.core.types import TokenRun

MAX_UNFITTING = 8  # waiting sequences that a plan looks past for one that fits
MAX_DEFERRED = 32  # likewise, for one whose prefix no other lane has more of
MAX_LEFT = 64  # likewise, that it leaves to lanes with room that are better for them: these come first
# Known tokens of the rows that join in a step, past which nobody else does: the worker is told all of them, in one
# message of at most protos.channel.MAX_MESSAGE_BYTES, and a token takes up to 5 bytes.
MAX_TOLD_TOKENS = 1 << 22


class StepPlanner:
    """Plans one step of one lane. It changes lane, sequences and queue as it goes: call `plan` once."""

    def __init__(self, state: State, lane: Lane, now_ms: int) -> None:
        self.draft = Draft(lane.max_num_batched_tokens)
        # That requests have begun, and ends of sequences for which there was no room even alone.
        self.runs: list[TokenRun] = []
        self._state = state
        self._lane = lane
        self._now_ms = now_ms
        self._num_left = 0  # sequences that this plan left to other lanes
        self._num_told_tokens = 0  # of rows that join

    def plan(self) -> None:
        """Fill `draft`."""
        lane, counters = self._lane, self._state.counters
        lane.is_kept = False
        lane.kv.relocate(lane.next_step_id, counters)
        self._plan_rows()
        # With no step in flight no result will have the lane planned again: what rows wait for must begin in this one.
        while self.draft.is_empty and lane.kv.is_row_starving and not lane.in_flight and not lane.kv.relocations:
            lane.kv.relocate(lane.next_step_id, counters)
            if not lane.kv.relocations:
                self._plan_rows()

    @property
    def _may_tell_more(self) -> bool:
        """Whether one more row may join: what the worker is told of those that do stays within a message."""
        return self._num_told_tokens < MAX_TOLD_TOKENS

    def _plan_rows(self) -> None:
        if self._state.config.policy is SchedulingPolicy.CONTINUOUS:
            self._plan_decodes()
            self._plan_prefills()
        else:
            self._plan_static()

    def _plan_static(self) -> None:
        """Fill a batch, nobody decoding; when nobody joins any more, decode until the last row has ended.

        While prompts are computed others may still join: requests sent together do not come together. But a batch has
        no more rows in all than fit at once, or short ones, each with the next behind it, would keep it open for ever.
        """
        lane = self._lane
        if not lane.num_rows:
            lane.is_batch_open, lane.num_joined = True, 0
        if lane.is_batch_open:
            self._plan_prefills()
        else:
            self._plan_chunks(sorted(lane.prefilling.values(), key=prompt_order))
        is_filling = bool(self.draft.rows or lane.prefilling)
        is_full = lane.num_joined >= lane.max_num_seqs
        lane.is_batch_open = lane.is_batch_open and not is_full and (is_filling or bool(lane.in_flight))
        if not lane.is_batch_open and not is_filling:
            self._plan_decodes()

    def _plan_decodes(self) -> None:
        """Schedule one token for every decoding row that is not known to end."""
        draft = self.draft
        for seq in draft.add_settled_decodes(self._lane.decoding.values()):
            charge(seq, len(seq.token_ids))
            if seq.num_computed_tokens + 1 >= seq.total_limit_tokens or seq.seq_id in draft.preempted:
                continue
            growth = self._grow(seq)
            if growth is not None:
                draft.add_row(seq, 1, growth)
        self._plan_beams()

    def _plan_beams(self) -> None:
        """Schedule the token of every beam whose last result is in."""
        lane = self._lane
        for seq in list(lane.beams.values()):
            if seq.seq_id not in lane.beams or seq.num_in_flight_tokens:  # preempted meanwhile, or not re-formed yet
                continue
            if seq.worker_lane_id != lane.lane_id:  # it was forked off another beam
                if not self._may_tell_more:
                    continue
                self._num_told_tokens += len(seq.token_ids)
            growth = self._grow(seq)
            if growth is not None:
                self.draft.add_row(seq, 1, growth)
                self.draft.picked[seq.seq_id] = seq.token_ids[-1]

    def _grow(self, seq: Seq) -> Growth | None:
        """Get `seq` room for one more token, preempting the newest rows if need be; None: it sits this step out."""
        kv = self._lane.kv
        while (growth := kv.grow(seq, 1)) is None:
            if not self._make_room(seq):
                return None
        return growth

    def _make_room(self, seq: Seq) -> bool:
        """Preempt the newest row, for the next token of `seq`. Return False when that sits this step out, or ended."""
        kv, num_wanted_tokens, lanes = self._lane.kv, seq.num_computed_tokens + 1, self._state.lanes.values()
        if kv.is_room_coming(seq):
            return False
        if self._is_alone(seq) or not any(lane.kv.can_hold(num_wanted_tokens, seq.precision.floor) for lane in lanes):
            if not seq.num_in_flight_tokens:  # else that token may be its last
                self._withdraw_search(seq)
                self.runs += end_outgrown(self._state, seq)
            return False
        victim = pick_victim(self._lane.rows(), kv)
        if victim is seq and seq.num_in_flight_tokens:
            return False  # likewise
        self._preempt(victim)
        return seq.lane_id is not None

    def _is_alone(self, seq: Seq) -> bool:
        """Return whether a row, or a beam search, has the lane for itself, and yet too little room."""
        lane = self._lane
        if seq.job.search is not None:
            return all(row.job is seq.job for row in lane.rows())
        return lane.num_rows == 1 and lane.kv.can_hold(seq.num_computed_tokens + 1, seq.precision.floor)

    def _preempt(self, victim: Seq) -> None:
        """Send a row back to the queue; it keeps its tokens and replays them. Its part in the draft is undone.

        A beam goes with its whole search, which starts over.
        """
        lane = self._lane
        self._state.counters.preemptions += 1
        if victim.job.search is not None:
            self._withdraw_search(victim)
            start_over(self._state, lane, victim.job)
            return
        self._withdraw(victim)
        stop(victim)
        lane.remove(victim)
        self._state.wait(victim)

    def _withdraw_search(self, seq: Seq) -> None:
        """Undo what is in the draft of the search that a row belongs to, if it belongs to one."""
        for beam in seq.job.beams:
            self._withdraw(beam)

    def _withdraw(self, seq: Seq) -> None:
        self.draft.preempted.add(seq.seq_id)
        self._lane.kv.pool.release(self.draft.remove_row(seq), self._lane.quarantine_end())

    def _plan_prefills(self) -> None:
        """Spend what is left of the budget on rows whose prompt is half computed, then on new ones.

        The first prompt of a tenant goes before the half computed ones of others.
        """
        queue = self._state.queue
        rows = sorted(self._lane.prefilling.values(), key=prompt_order)
        if rows and queue and queue.num_tenants > 1 and not self.draft.preempted:
            self._admit(before=rows[0].job.tenant)
        self._plan_chunks(rows)
        if queue and not self.draft.preempted:
            self._admit()

    def _plan_chunks(self, rows: Sequence[Seq]) -> None:
        """Spend the budget on rows whose prompt is half computed, in this order."""
        for seq in rows:
            if self.draft.budget_tokens and seq.seq_id in self._lane.prefilling:  # else it was preempted meanwhile
                self._plan_prefill(seq)

    def _plan_prefill(self, seq: Seq) -> None:
        """Schedule a row's next chunk, preempting the newest rows if there is not room for one token of it."""
        while not self._plan_chunk(seq):
            if not self._make_room(seq):
                return

    def _plan_chunk(self, seq: Seq) -> bool:
        """Schedule the next chunk of a row's known tokens; the last one samples. False: no token of it has room."""
        lane = self._lane
        num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, self.draft.budget_tokens)
        num_tokens = lane.kv.num_tokens_with_room(seq, num_tokens)
        if not num_tokens:
            return False
        growth = lane.kv.grow(seq, num_tokens)
        assert growth is not None, "a reservation was not kept"
        # What goes beyond the prompt is replayed output.
        self._state.counters.prompt_tokens += min(num_tokens, max(0, seq.num_prompt_tokens - seq.num_computed_tokens))
        lane.plan_chunk(self.draft, seq, num_tokens, growth)
        charge(seq, seq.num_computed_tokens)
        if seq.num_computed_tokens == len(seq.token_ids):
            del lane.prefilling[seq.seq_id]
            if seq.job.search is not None:
                lane.beams[seq.seq_id] = seq
                return True
            lane.decoding[seq.seq_id] = seq
            if not seq.num_output_tokens:  # else it is not the leader: older, its blocks may be narrower
                self._fork_unforked(seq)
        return True

    def _fork_unforked(self, parent: Seq) -> None:
        """Let the sequences that waited for the parent's prompt share it; they are planned from the next step on.

        Where rows are short or their tenant is at its limit, they queue like everybody else, and find the prompt in the
        cache.
        """
        lane, job, queue = self._lane, parent.job, self._state.queue
        for child in job.unforked:
            has_row = lane.num_free_rows and not queue.is_at_running_limit(job.tenant, 1)
            if has_row and self._may_tell_more:
                lane.fork(parent, child)
                self._num_told_tokens += len(child.token_ids)
                spare(child, child.num_prompt_tokens)
                job.tenant.num_running_seqs += 1
            else:
                self._state.wait(child)
        job.unforked = []

    def _admit(self, before: Tenant | None = None) -> None:
        """Bind waiting sequences to the lane while it has rows, tokens and blocks for them.

        With `before` only those that go before the half computed prompts of that tenant.
        """
        lane, router = self._lane, self._state.router
        if lane.is_draining:
            return
        unfitting: list[Seq] = []
        deferred: list[Seq] = []
        in_turn = self._state.queue.in_turn(self._is_barred)
        for seq in self._candidates(in_turn, before):
            hits = lane.kv.cached_prefix(seq)
            if lane.kv.awaits_prefix(seq, len(hits)):
                continue
            if not self._has_room(seq, hits):
                self._give_back(seq)
                lane.is_kept = keeps_lane(seq, lane.lane_id, self._now_ms)
                if lane.is_kept:
                    break
                unfitting.append(seq)
            elif router.leave_to_better(seq, lane, len(hits)):
                self._num_left += 1
            elif before is None and self._is_held_elsewhere(seq, len(hits)):
                deferred.append(seq)
            else:
                self._bind(seq, hits, passed=(*unfitting, *deferred))
            if len(unfitting) >= MAX_UNFITTING or len(deferred) >= MAX_DEFERRED:
                break
        self._admit_deferred(deferred, unfitting)
        # A plan that gives no step calls nobody: two lanes could call each other for ever.
        if before is None and not self.draft.is_empty:
            router.call_idle_lane(lane, in_turn)

    def _give_back(self, seq: Seq) -> None:
        """Have another lane look at a sequence that does not fit, if it was left to this one."""
        if seq.better_lane is not None and seq.better_lane.lane_id == self._lane.lane_id:
            seq.better_lane = seq.longest_hint = None
            self._state.router.call_lane_for(seq)

    def _admit_deferred(self, deferred: Sequence[Seq], unfitting: Sequence[Seq]) -> None:
        """Bind sequences whose prefix is held elsewhere where others left room, and limits allow it still."""
        kv, router = self._lane.kv, self._state.router
        for seq in deferred:
            if not (self.draft.budget_tokens and self._may_tell_more) or self._is_barred(seq):
                continue
            hits = kv.cached_prefix(seq)
            is_taken = not kv.awaits_prefix(seq, len(hits)) and self._has_room(seq, hits)
            if is_taken and not router.leave_to_better(seq, self._lane, len(hits)):
                self._bind(seq, hits, passed=unfitting)

    def _has_room(self, seq: Seq, hits: list[Block]) -> bool:
        lane = self._lane
        has_rows = seq.num_wanted_rows <= lane.num_free_rows
        return has_rows and lane.kv.can_admit(seq, hits, watermark_blocks(lane, seq))

    def _is_held_elsewhere(self, seq: Seq, num_hits: int) -> bool:
        """Return whether `seq` comes after others because a full lane has more of its prefix than this one.

        Only while more wait than have room here, and until it was passed too often.
        """
        if len(self._state.queue) <= self._lane.num_free_rows or keeps_lane(seq, self._lane.lane_id, self._now_ms):
            return False
        return self._state.router.is_longer_elsewhere(seq, self._lane, num_hits)

    def _candidates(self, in_turn: Iterator[Seq], before: Tenant | None) -> Iterator[Seq]:
        """Yield waiting sequences in turn while the lane has rows and tokens for one; see `_admit`.

        Not those that another lane can serve alone, or one that will come, nor those known to be better off elsewhere.
        """
        lane, router = self._lane, self._state.router
        while lane.num_free_rows and self.draft.budget_tokens and self._num_left < MAX_LEFT and self._may_tell_more:
            seq = next(in_turn, None)
            if seq is None or (before is not None and not goes_before(seq.job.tenant, before)):
                return
            if seq.kept_lane_id is None and router.leave_to_noted(seq, lane):
                self._num_left += 1
            elif lane.could_serve(seq):
                yield seq

    def _is_barred(self, seq: Seq) -> bool:
        """Return whether a limit of its tenant keeps `seq` out of the lane."""
        queue = self._state.queue
        is_at_limit = queue.is_at_running_limit(seq.job.tenant, seq.num_wanted_rows)
        return is_at_limit or queue.exceeds_kv_share(seq, self._lane)

    def _bind(self, seq: Seq, hits: list[Block], passed: Sequence[Seq] = ()) -> None:
        """Make a waiting sequence a row of the lane, passing others, and schedule its first chunk."""
        for other in passed:
            pass_over(other, self._now_ms)
        lane, state = self._lane, self._state
        state.queue.start(seq)
        forget_passes(seq)
        seq.better_lane = seq.longest_hint = None
        if seq.worker_lane_id is not None and seq.worker_lane_id != lane.lane_id:
            state.lanes[seq.worker_lane_id].forget_row(seq)
        lane.begin(seq, hits)
        self._num_told_tokens += len(seq.token_ids)
        spare(seq, seq.num_computed_tokens)
        if seq.job.num_cached_tokens is None:
            seq.job.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            state.counters.prefix_cache_queries += seq.num_prompt_tokens
            state.counters.prefix_cache_hits += seq.job.num_cached_tokens
            if seq.end is None:  # else it is a beam of which only others' answers are wanted
                self.runs.append(seq.begun_run())
        self._plan_chunk(seq)
