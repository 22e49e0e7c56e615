"""The scheduler's core: requests come in, step plans go out, step results come in, tokens go out.

    submit ──▶ waiting ──plan: admitted, bound to a lane──▶ running ──apply: a stop token, a limit──▶ finished
                  ▲                                            │
                  └──────── preempted, lane or step lost ──────┘

Pure and deterministic: time comes in as an argument. `plan` runs ahead of `apply` by up to two steps, assuming that
every decoding row gives one token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.kv_manager import Growth, KVManager
from scheduler_svc.core.lane import Draft, Lane, PlannedStep
from scheduler_svc.core.policy import (
    SchedulingPolicy,
    WaitingQueue,
    forget_passes,
    keeps_lane,
    newest,
    pass_over,
    watermark_blocks,
)
from scheduler_svc.core.router import has_better_lane
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.types import (
    Counters,
    ErrorCode,
    FinishReason,
    LaneId,
    LaneSpec,
    LaneStats,
    PrefixIndex,
    Request,
    RequestId,
    SampledRow,
    SchedulerError,
    Seal,
    SeqId,
    StepPlan,
    StepResult,
    StepStatus,
    TokenRun,
)

MAX_LOSSES = 3  # a sequence lost so often without a new token is taken for the cause
MAX_HOMELESS_MS = 60_000  # a worker as large as the one that was lost may come back
MAX_UNFITTING = 8  # waiting sequences that a plan looks past for one that fits
_RESUBMITTED = -(2**40)  # what was being served before a restart goes before all that is new


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the cell; a lane's own limits count where they are smaller."""

    max_num_seqs: int = 128  # rows of a lane
    max_num_batched_tokens: int | None = None  # tokens a step; None: what the worker offers
    max_queued_seqs: int = 4096
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.CONTINUOUS


class Scheduler:
    """Every request, sequence and lane of a cell; the one writer of all of them."""

    def __init__(self, config: SchedulerConfig, index: PrefixIndex) -> None:
        self.config = config
        self.counters = Counters()
        self._index = index
        self._lanes: dict[LaneId, Lane] = {}
        self._jobs: dict[RequestId, Job] = {}
        self._seqs: dict[SeqId, Seq] = {}
        self._queue = WaitingQueue()
        self._arrivals = count(1)
        self._seq_ids = count(1)
        # The largest of any lane that was ever here: without a lane requests wait for one like it.
        self._max_model_len: int | None = None
        self._max_seq_tokens: int | None = None  # that a pool can hold

    # ---- lanes

    def add_lane(self, lane_id: LaneId, spec: LaneSpec) -> list[TokenRun]:
        """Add a worker. Returns the ends of queued requests that it shows can never be served."""
        assert lane_id not in self._lanes
        config = self.config
        budget_tokens = min(spec.max_num_batched_tokens, config.max_num_batched_tokens or spec.max_num_batched_tokens)
        self._lanes[lane_id] = Lane(
            lane_id,
            KVManager(BlockPool(spec.num_blocks, spec.blocks_per_slab), spec.block_size, config.enable_prefix_caching),
            max_num_seqs=min(spec.max_num_seqs, config.max_num_seqs, budget_tokens),
            max_num_batched_tokens=budget_tokens,
        )
        self._max_model_len = max(self._max_model_len or 0, spec.max_model_len)
        self._max_seq_tokens = max(self._max_seq_tokens or 0, spec.num_blocks * spec.block_size)
        return self._end_unservable()

    def restore(self, lane_id: LaneId, seals: Iterable[Seal]) -> None:
        """Take over the sealed blocks of a worker's manifest, after add_lane and before the first plan."""
        if self.config.enable_prefix_caching:
            self._index.publish(lane_id, self._lanes[lane_id].kv.pool.restore(seals))

    def drop_lane(self, lane_id: LaneId) -> list[TokenRun]:
        """Remove a worker that is gone. Its sequences go back to the queue and finish elsewhere.

        One whose step was in flight at the third such loss in a row ends with an error. An unknown lane is ignored.
        """
        lane = self._lanes.pop(lane_id, None)
        if lane is None:
            return []
        self.counters.worker_losses += 1
        self._index.drop_lane(lane_id)
        lost = {seq_id for step in lane.in_flight for seq_id in step.live_seq_ids()}
        runs = []
        for seq in lane.rows():
            runs += self._requeue(lane, seq, is_lost=seq.seq_id in lost)
        self._forget_worker(lane_id)
        return runs

    # ---- requests

    def submit(self, request: Request) -> list[TokenRun]:
        """Queue a request, or attach to one that is known; returns what the client has not got of it yet.

        Raises SchedulerError when the request can never be served or the queue is full.
        """
        job = self._jobs.get(request.request_id)
        if job is not None:
            return [run for seq in job.seqs for run in seq.replay(request.delivered.get(seq.sequence_idx))]
        is_new = not request.delivered
        if is_new and self.num_waiting_seqs + request.n > self.config.max_queued_seqs:
            raise SchedulerError(
                ErrorCode.RESOURCE_EXHAUSTED, f"{self.num_waiting_seqs} sequences are waiting already: try again later"
            )
        self._check_servable(len(request.prompt_token_ids))
        job = Job(request, next(self._arrivals) + (0 if is_new else _RESUBMITTED))
        runs = self._add_seqs(job)
        if job.num_unfinished:
            self._jobs[request.request_id] = job
        return runs

    def abort(self, request_id: RequestId, sequence_idx: int | None = None) -> list[TokenRun]:
        """End a request's sequences, or one of them. Idempotent, in every state."""
        job = self._jobs.get(request_id)
        if job is None:
            return []
        seqs = [seq for seq in job.seqs if seq.state is not SeqState.FINISHED]
        if sequence_idx is not None:
            seqs = [seq for seq in seqs if seq.sequence_idx == sequence_idx]
        # The unforked ones first: else ending the leader would make each of them the leader in turn.
        seqs.sort(key=lambda seq: seq.state is not SeqState.UNFORKED)
        return [self._end(seq, FinishReason.ABORT) for seq in seqs]

    def expire(self, now_ms: int) -> list[TokenRun]:
        """End the requests whose deadline has passed, and those that no lane has been able to hold for a minute."""
        late = [j for j in self._jobs.values() if j.request.deadline_ms is not None and j.request.deadline_ms <= now_ms]
        error = SchedulerError(ErrorCode.DEADLINE_EXCEEDED, "the request's deadline passed before it was done")
        runs = [
            self._end(seq, FinishReason.ERROR, error)
            for job in late
            for seq in job.seqs
            if seq.state is not SeqState.FINISHED
        ]
        for seq in self._queue:
            if not self._lanes or self._some_lane_holds(len(seq.token_ids)):
                seq.homeless_since_ms = None
            elif seq.homeless_since_ms is None:
                seq.homeless_since_ms = now_ms
            elif now_ms - seq.homeless_since_ms >= MAX_HOMELESS_MS:
                runs.append(self._end(seq, FinishReason.ERROR, _outgrown(len(seq.token_ids))))
        return runs

    def request_ids(self) -> set[RequestId]:
        """Return the requests that have not ended."""
        return set(self._jobs)

    # ---- steps

    def plan(self, lane_id: LaneId, now_ms: int) -> tuple[StepPlan | None, list[TokenRun]]:
        """Plan the lane's next step; None when there is nothing to do, or two steps are in flight.

        Also returns the ends of sequences for which there was no room even alone.
        """
        lane = self._lanes[lane_id]
        if not lane.can_plan():
            return None, []
        draft = Draft(lane.max_num_batched_tokens)
        if self.config.policy is SchedulingPolicy.CONTINUOUS:
            runs = self._plan_decodes(lane, draft)
            self._plan_prefills(lane, draft, now_ms)
        else:
            runs = self._plan_static(lane, draft, now_ms)
        self._withdraw_evicted(lane)
        if not draft.rows and (lane.in_flight or not lane.has_news()):
            return None, runs
        self.counters.steps += 1
        return lane.finish(draft), runs

    def apply(self, lane_id: LaneId, result: StepResult) -> list[TokenRun]:
        """Take the result of the lane's oldest step in flight. What belongs to an older seq_epoch is ignored."""
        lane = self._lanes[lane_id]
        step = lane.in_flight.popleft()
        assert step.step_id == result.step_id, f"step {result.step_id} answered, step {step.step_id} expected"
        runs = []
        if result.status is StepStatus.OK:
            for failed in result.failed_rows:
                runs += self._fail_row(lane, failed.seq_id, failed.seq_epoch, failed.error)
            self._seal(lane, step)
            new_runs = [run for run in map(self._take_tokens, result.sampled) if run is not None]
            self.counters.output_tokens += sum([len(run.token_ids) for run in new_runs])
            runs += new_runs
        elif result.status is StepStatus.FAILED:
            runs = self._fail_step(lane, step, result.error)
        lane.kv.pool.end_quarantine(step.step_id)
        self._publish_sealed(lane)
        return runs

    # ---- figures

    @property
    def num_waiting_seqs(self) -> int:
        """Sequences in the queue, and those that wait for their request's leader."""
        return len(self._seqs) - self.num_running_seqs

    @property
    def num_running_seqs(self) -> int:
        """Sequences that are rows of a lane."""
        return sum(lane.num_rows for lane in self._lanes.values())

    def lane_stats(self, lane_id: LaneId) -> LaneStats:
        """Return a lane's figures."""
        return self._lanes[lane_id].stats()

    # ---- submitting

    def _check_servable(self, num_prompt_tokens: int) -> None:
        """Raise SchedulerError when a prompt can never be served by a lane like those seen so far."""
        if num_prompt_tokens == 0:
            raise SchedulerError(ErrorCode.INVALID_ARGUMENT, "the prompt is empty", "prompt")
        if self._max_model_len is not None and num_prompt_tokens >= self._max_model_len:
            raise SchedulerError(
                ErrorCode.INVALID_ARGUMENT,
                f"the prompt has {num_prompt_tokens} tokens: with one token of output that is more than the model's "
                f"context of {self._max_model_len}",
                "prompt",
            )
        if self._max_seq_tokens is not None and num_prompt_tokens >= self._max_seq_tokens:
            raise SchedulerError(
                ErrorCode.INVALID_ARGUMENT,
                f"the prompt has {num_prompt_tokens} tokens: the KV cache holds {self._max_seq_tokens}",
                "prompt",
            )

    def _add_seqs(self, job: Job) -> list[TokenRun]:
        """Make the sequences of a new job and queue them; returns the ends of those that have all their tokens."""
        request, runs = job.request, []
        for sequence_idx in range(request.n):
            delivered = request.delivered.get(sequence_idx)
            if delivered is not None and delivered.finish_reason is not None:
                continue
            seq = Seq(
                seq_id=SeqId(next(self._seq_ids)),
                job=job,
                sequence_idx=sequence_idx,
                token_ids=[*request.prompt_token_ids, *(delivered.token_ids if delivered else ())],
                num_prompt_tokens=len(request.prompt_token_ids),
                total_limit_tokens=len(request.prompt_token_ids) + request.ending.max_tokens,
                rank=(request.priority, job.arrival, sequence_idx),
                ending=request.ending,
                num_delivered_tokens=len(delivered.token_ids) if delivered else 0,
            )
            if self._max_model_len is not None:
                seq.total_limit_tokens = min(seq.total_limit_tokens, self._max_model_len)
            job.seqs.append(seq)
            job.num_unfinished += 1
            self._seqs[seq.seq_id] = seq
        # Sequences without output share the prompt's KV: the first computes it. Others stand for themselves.
        fresh = [seq for seq in job.seqs if not seq.num_output_tokens]
        job.unforked = fresh[1:]
        for seq in job.unforked:
            seq.state = SeqState.UNFORKED
        for seq in job.seqs:
            if seq.state is SeqState.WAITING:
                self._queue.add(seq)
            reason = seq.finish_reason() if seq.num_output_tokens else None
            if reason is not None:
                runs.append(self._end(seq, reason))
        return runs

    def _end_unservable(self) -> list[TokenRun]:
        """End what was queued before the limits were known and exceeds them; clamp the rest."""
        runs = []
        for seq in tuple(self._seqs.values()):
            assert self._max_model_len is not None
            seq.total_limit_tokens = min(seq.num_prompt_tokens + seq.ending.max_tokens, self._max_model_len)
            try:
                self._check_servable(seq.num_prompt_tokens)
            except SchedulerError as error:
                runs.append(self._end(seq, FinishReason.ERROR, error))
        return runs

    # ---- planning

    def _plan_static(self, lane: Lane, draft: Draft, now_ms: int) -> list[TokenRun]:
        """Fill a batch, nobody decoding; when nobody joins any more, decode until the last row has ended."""
        lane.is_batch_open = lane.is_batch_open or lane.num_rows == 0
        if lane.is_batch_open:
            self._plan_prefills(lane, draft, now_ms)
            lane.is_batch_open = bool(draft.rows)
        return [] if lane.is_batch_open else self._plan_decodes(lane, draft)

    def _plan_prefills(self, lane: Lane, draft: Draft, now_ms: int) -> None:
        """Spend what is left of the budget on rows whose prompt is half computed, then on new ones."""
        for seq in sorted(lane.prefilling.values(), key=lambda seq: seq.rank):
            if draft.budget_tokens:
                self._plan_chunk(lane, draft, seq)
        if not draft.preempted:
            self._admit(lane, draft, now_ms)

    def _plan_decodes(self, lane: Lane, draft: Draft) -> list[TokenRun]:
        """Schedule one token for every decoding row that is not known to end."""
        runs: list[TokenRun] = []
        for seq in draft.add_settled_decodes(lane.decoding.values()):
            if seq.num_computed_tokens + 1 >= seq.total_limit_tokens or seq.seq_id in draft.preempted:
                continue
            growth = self._grow(lane, draft, seq, runs)
            if growth is not None:
                draft.add_row(seq, 1, growth)
                seq.num_in_flight_tokens += 1
        return runs

    def _grow(self, lane: Lane, draft: Draft, seq: Seq, runs: list[TokenRun]) -> Growth | None:
        """Get `seq` room for one more token, preempting the newest rows if need be; None: it sits this step out."""
        while (growth := lane.kv.grow(seq, 1)) is None:
            if lane.kv.pool.num_quarantined >= lane.kv.num_missing_blocks(seq, 1):
                return None
            if not self._some_lane_holds(seq.num_computed_tokens + 1):
                if not seq.num_in_flight_tokens:  # else that token may be its last
                    runs.append(self._end(seq, FinishReason.ERROR, _outgrown(len(seq.token_ids))))
                return None
            victim = newest(lane.rows())
            if victim is seq and seq.num_in_flight_tokens:
                return None  # likewise
            self._preempt(lane, draft, victim)
            if victim is seq:
                return None
        return growth

    def _some_lane_holds(self, num_tokens: int) -> bool:
        return any(lane.kv.can_hold(num_tokens) for lane in self._lanes.values())

    def _preempt(self, lane: Lane, draft: Draft, victim: Seq) -> None:
        """Send a row back to the queue; it keeps its tokens and replays them. Its part in the draft is undone."""
        self.counters.preemptions += 1
        draft.preempted.add(victim.seq_id)
        lane.kv.pool.release(draft.remove_row(victim), lane.quarantine_end())
        lane.remove(victim)
        self._wait(victim)

    def _plan_chunk(self, lane: Lane, draft: Draft, seq: Seq) -> None:
        """Schedule the next chunk of a row's known tokens; its blocks were reserved. The last chunk samples."""
        num_tokens = min(len(seq.token_ids) - seq.num_computed_tokens, draft.budget_tokens)
        growth = lane.kv.grow(seq, num_tokens)
        assert growth is not None, "a reservation was not kept"
        draft.add_row(seq, num_tokens, growth)
        self.counters.prompt_tokens += num_tokens
        if seq.num_computed_tokens == len(seq.token_ids):
            seq.num_in_flight_tokens = 1
            del lane.prefilling[seq.seq_id]
            lane.decoding[seq.seq_id] = seq
            self._fork_unforked(lane, seq)

    def _fork_unforked(self, lane: Lane, parent: Seq) -> None:
        """Let the sequences that waited for the parent's prompt share it; they are planned from the next step on.

        Where rows are short they queue like everybody else, and find the prompt in the cache.
        """
        job = parent.job
        for child in job.unforked:
            if lane.num_rows < lane.max_num_seqs:
                lane.kv.fork(parent, child)
                child.state, child.lane_id = SeqState.RUNNING, lane.lane_id
                lane.decoding[child.seq_id] = child
            else:
                self._wait(child)
        job.unforked = []

    def _admit(self, lane: Lane, draft: Draft, now_ms: int) -> None:
        """Bind waiting sequences to the lane while it has rows, tokens and blocks for them."""
        unfitting: list[Seq] = []
        for seq in self._queue:
            if lane.num_rows >= lane.max_num_seqs or not draft.budget_tokens or len(unfitting) >= MAX_UNFITTING:
                break
            if not lane.kv.can_hold(len(seq.token_ids)):
                continue  # another lane can, or one that will come
            hits = lane.kv.cached_prefix(seq)
            if lane.kv.awaits_prefix(seq, len(hits)):
                continue
            if not lane.kv.can_admit(seq, hits, watermark_blocks(lane, seq)):
                if keeps_lane(seq, lane.lane_id, now_ms):
                    break
                unfitting.append(seq)
                continue
            if len(self._lanes) > 1 and has_better_lane(seq, lane, len(hits), self._lanes.values(), self._index):
                continue
            self._bind(lane, draft, seq, hits)
            for passed in unfitting:
                pass_over(passed, now_ms)

    def _bind(self, lane: Lane, draft: Draft, seq: Seq, hits: list[Block]) -> None:
        """Make a waiting sequence a row of the lane and schedule its first chunk."""
        self._queue.remove(seq)
        forget_passes(seq)
        if seq.worker_lane_id is not None and seq.worker_lane_id != lane.lane_id:
            self._lanes[seq.worker_lane_id].forget_row(seq)
        seq.state, seq.lane_id = SeqState.RUNNING, lane.lane_id
        lane.kv.admit(seq, hits)
        lane.prefilling[seq.seq_id] = seq
        if seq.job.num_cached_tokens is None:
            seq.job.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.counters.prefix_cache_queries += seq.num_prompt_tokens
            self.counters.prefix_cache_hits += seq.job.num_cached_tokens
        self._plan_chunk(lane, draft, seq)

    # ---- applying

    def _seal(self, lane: Lane, step: PlannedStep) -> None:
        """Seal the blocks that a step filled. Before the step's tokens are taken: all tokens it wrote are known."""
        if not self.config.enable_prefix_caching:
            return
        block_size = lane.kv.block_size
        for seq, seq_epoch, _, _, num_computed_tokens in step.rows:
            if num_computed_tokens >= (seq.num_sealed_blocks + 1) * block_size and seq_epoch == seq.seq_epoch:
                lane.kv.commit(seq, num_computed_tokens)

    def _take_tokens(self, sampled: SampledRow) -> TokenRun | None:
        """Append sampled tokens to their sequence, up to the one that ends it."""
        seq_id, seq_epoch, token_ids, logprobs = sampled
        seq = self._seqs.get(seq_id)
        if seq is None or seq.seq_epoch != seq_epoch:
            return None
        first_token_idx = len(seq.token_ids) - seq.num_prompt_tokens
        reason = None
        for num_taken, token_id in enumerate(token_ids, 1):
            seq.token_ids.append(token_id)
            reason = seq.finish_reason()
            if reason is not None:
                token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
                break
        seq.num_in_flight_tokens -= 1
        seq.num_losses = 0
        if logprobs:
            seq.logprobs += logprobs
        run = seq.run(first_token_idx, token_ids, logprobs)
        if reason is None:
            return run
        return run._replace(finish_reason=reason, usage=self._end(seq, reason).usage)

    def _fail_row(self, lane: Lane, seq_id: SeqId, seq_epoch: int, error: str) -> list[TokenRun]:
        """Send a row that failed back to the queue, with the sequences that were forked from what it computed."""
        failed = self._seqs.get(seq_id)
        if failed is None or failed.seq_epoch != seq_epoch or failed.lane_id != lane.lane_id:
            return []
        forked = [
            s for s in failed.job.seqs if s is not failed and s.lane_id == lane.lane_id and not s.num_output_tokens
        ]
        runs = self._requeue(lane, failed, is_lost=True, error=error)
        for seq in forked:
            if seq.lane_id == lane.lane_id:
                runs += self._requeue(lane, seq, is_lost=False)
        return runs

    def _fail_step(self, lane: Lane, step: PlannedStep, error: str) -> list[TokenRun]:
        """Start the lane's rows over after a step that failed as a whole: what its blocks hold is not known.

        The worker skips what is in flight and begins the restart without rows.
        """
        lost = step.live_seq_ids()
        runs = []
        for seq in lane.rows():
            runs += self._requeue(lane, seq, is_lost=seq.seq_id in lost, error=error)
        self._forget_worker(lane.lane_id)
        lane.restart, lane.finished_seq_ids = True, []
        return runs

    def _requeue(self, lane: Lane, seq: Seq, *, is_lost: bool, error: str = "") -> list[TokenRun]:
        """Take a row off its lane to start over; one that was lost too often in a row ends instead."""
        seq.num_losses += is_lost
        if seq.num_losses >= MAX_LOSSES:
            return [self._end(seq, FinishReason.ERROR, _poisoned(seq.num_losses, error))]
        lane.remove(seq)
        lane.forget_row(seq)
        self._wait(seq)
        return []

    def _forget_worker(self, lane_id: LaneId) -> None:
        """Forget which sequences a worker has as rows: it has none any more."""
        for seq in self._seqs.values():
            if seq.worker_lane_id == lane_id:
                seq.worker_lane_id = None
            if seq.kept_lane_id == lane_id:
                forget_passes(seq)

    # ---- ending

    def _wait(self, seq: Seq) -> None:
        seq.state = SeqState.WAITING
        self._queue.add(seq)

    def _end(self, seq: Seq, reason: FinishReason, error: SchedulerError | None = None) -> TokenRun:
        """End a sequence in whatever state it is; returns its terminal run."""
        job = seq.job
        if seq.state is SeqState.RUNNING and seq.lane_id in self._lanes:
            self._lanes[seq.lane_id].remove(seq)
        elif seq.state is SeqState.WAITING:
            self._queue.remove(seq)
        elif seq.state is SeqState.UNFORKED:
            job.unforked.remove(seq)
        if seq.worker_lane_id is not None and seq.worker_lane_id in self._lanes:
            self._lanes[seq.worker_lane_id].forget_row(seq)
        is_leader = seq.state is not SeqState.UNFORKED and not seq.num_output_tokens
        seq.state = SeqState.FINISHED
        if is_leader and job.unforked:
            leader = job.unforked.pop(0)
            leader.num_losses = max(0, seq.num_losses - 1)  # the prompt that it will compute may be the cause
            self._wait(leader)
        del self._seqs[seq.seq_id]
        job.num_unfinished -= 1
        if not job.num_unfinished:
            self._jobs.pop(job.request.request_id, None)
        return seq.ended_run(reason, error)

    # ---- the index

    def _publish_sealed(self, lane: Lane) -> None:
        if lane.kv.new_hashes:
            self._index.publish(lane.lane_id, lane.kv.new_hashes)
            lane.kv.new_hashes = []

    def _withdraw_evicted(self, lane: Lane) -> None:
        pool = lane.kv.pool
        self.counters.evicted_blocks += pool.num_evictions
        pool.num_evictions = 0
        if pool.evicted_hashes:
            self._index.withdraw(lane.lane_id, pool.evicted_hashes)
            pool.evicted_hashes = []

    # ---- checking

    def check_integrity(self) -> None:
        """Raise AssertionError when any two parts of the state disagree. O(everything), for tests."""
        queued = set(self._queue)
        running = {seq for lane in self._lanes.values() for seq in lane.rows()}
        unforked = {seq for job in self._jobs.values() for seq in job.unforked}
        assert {s for s in self._seqs.values() if s.state is SeqState.WAITING} == queued
        assert {s for s in self._seqs.values() if s.state is SeqState.RUNNING} == running
        assert {s for s in self._seqs.values() if s.state is SeqState.UNFORKED} == unforked
        for job in self._jobs.values():
            live = [seq for seq in job.seqs if seq.state is not SeqState.FINISHED]
            assert 0 < len(live) == job.num_unfinished
            assert not job.unforked or any(not s.num_output_tokens for s in live if s not in unforked), "no leader"
        for seq in self._seqs.values():
            assert (seq.lane_id is not None) == (seq.state is SeqState.RUNNING)
            assert seq.state is SeqState.RUNNING or not (seq.table or seq.num_computed_tokens)
        for lane in self._lanes.values():
            lane.kv.check_integrity(lane.rows())
            assert lane.num_rows <= lane.max_num_seqs
            for seq in lane.decoding.values():
                assert seq.num_computed_tokens in (
                    len(seq.token_ids) + seq.num_in_flight_tokens - 1,
                    len(seq.token_ids) - 1,
                )


def _outgrown(num_tokens: int) -> SchedulerError:
    return SchedulerError(
        ErrorCode.RESOURCE_EXHAUSTED, f"the KV cache is too small for a sequence of more than {num_tokens - 1} tokens"
    )


def _poisoned(num_losses: int, error: str) -> SchedulerError:
    message = f"the sequence was being computed at {num_losses} failures in a row"
    return SchedulerError(ErrorCode.INTERNAL, f"{message}: {error}" if error else message)
