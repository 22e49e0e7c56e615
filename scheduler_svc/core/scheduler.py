"""The scheduler's core: requests come in, step plans go out, step results come in, tokens go out.

    submit ──▶ waiting ──plan: admitted, bound to a lane──▶ running ──apply: a stop token, a limit──▶ finished
                  ▲                                            │
                  └──────── preempted, lane or step lost ──────┘

Pure and deterministic: time comes in as an argument. `plan` runs ahead of `apply` by up to two steps, assuming that
every decoding row gives one token.

This module is what the shell calls. What happens is in `submission`, `planner`, `results`, `losses` and `ends`, all of
which work on one `state`.
"""

from collections.abc import Iterable, Sequence

from protos.block_hash import BlockHash
from scheduler_svc.core import ends, losses, results, submission
from scheduler_svc.core.fairness import FairQueue
from scheduler_svc.core.kv_manager import KVManager
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.mixed_kv import make_kv_manager, max_seq_tokens
from scheduler_svc.core.planner import StepPlanner
from scheduler_svc.core.policy import forget_passes
from scheduler_svc.core.publication import withdraw_evicted
from scheduler_svc.core.state import SchedulerConfig, State
from scheduler_svc.core.types import (
    Counters,
    Format,
    LaneId,
    LaneSpec,
    LaneStats,
    PrefixIndex,
    Request,
    RequestId,
    Seal,
    StepPlan,
    StepResult,
    TokenRun,
)


class Scheduler:
    """Every request, sequence and lane of a cell; the one writer of all of them."""

    def __init__(self, config: SchedulerConfig, index: PrefixIndex) -> None:
        self._state = State(config, index, FairQueue(config.fairness))

    # ---- lanes

    def max_seq_tokens(self, spec: LaneSpec) -> dict[Format, int]:
        """Return the tokens of the longest sequence that a worker's whole pool would hold, by a request's floor.

        Raises PrecisionError when the worker lacks a format that the precision policy uses: it can have no lane.
        """
        precision = self._state.config.precision
        limits = max_seq_tokens(spec, precision)
        return {fmt: limits[precision.limited_to(fmt).floor] for fmt in Format}

    def max_rows(self, spec: LaneSpec) -> int:
        """Return how many sequences a worker's lane would run at once."""
        return min(spec.max_num_seqs, self._state.config.max_num_seqs, self._budget_tokens(spec))

    def add_lane(self, lane_id: LaneId, spec: LaneSpec) -> list[TokenRun]:
        """Add a worker. Returns the ends of queued requests that it shows can never be served.

        Raises PrecisionError; see `max_seq_tokens`.
        """
        state = self._state
        assert lane_id not in state.lanes
        lane = state.lanes[lane_id] = Lane(
            lane_id,
            self._make_kv_manager(spec),
            max_num_seqs=self.max_rows(spec),
            max_num_batched_tokens=self._budget_tokens(spec),
        )
        return submission.learn_limits(state, lane, spec.max_model_len)

    def restore(self, lane_id: LaneId, seals: Iterable[Seal]) -> None:
        """Take over the sealed blocks of a worker's manifest, after add_lane and before the first plan."""
        if self._state.config.enable_prefix_caching:
            self._state.index.publish(lane_id, self._state.lanes[lane_id].kv.restore(seals))

    def drain_lane(self, lane_id: LaneId) -> bool:
        """Bind nothing more to a lane whose worker is about to leave; the rows that it has go on.

        Returns whether it did not drain before.
        """
        lane = self._state.lanes[lane_id]
        if lane.is_draining:
            return False
        lane.is_draining = True
        for seq in self._state.queue:
            if seq.kept_lane_id == lane_id:
                forget_passes(seq)
        return True

    def is_drained(self, lane_id: LaneId) -> bool:
        """Return whether a lane that drains has no row any more, and no step in flight."""
        return self._state.lanes[lane_id].is_drained

    def drop_lane(self, lane_id: LaneId) -> list[TokenRun]:
        """Remove a worker that is gone. Its sequences go back to the queue and finish elsewhere.

        One whose step was in flight at the third such loss in a row ends with an error. An unknown lane is ignored.
        """
        return losses.drop_lane(self._state, lane_id)

    def _budget_tokens(self, spec: LaneSpec) -> int:
        return min(
            spec.max_num_batched_tokens, self._state.config.max_num_batched_tokens or spec.max_num_batched_tokens
        )

    def _make_kv_manager(self, spec: LaneSpec) -> KVManager:
        config = self._state.config
        return make_kv_manager(spec, config.precision, self._budget_tokens(spec), config.enable_prefix_caching)

    # ---- requests

    def submit(self, request: Request) -> list[TokenRun]:
        """Queue a request, or attach to one that is known; returns what the client has not got of it yet.

        Raises SchedulerError when the request can never be served or the queue is full.
        """
        return submission.submit(self._state, request)

    def abort(self, request_id: RequestId, sequence_idx: int | None = None) -> list[TokenRun]:
        """End a request's sequences, or one of them. Idempotent, in every state."""
        return ends.abort(self._state, request_id, sequence_idx)

    def expire(self, now_ms: int) -> list[TokenRun]:
        """End the requests whose deadline has passed, and those that no lane has been able to hold for a minute."""
        return ends.expire(self._state, now_ms)

    def request_ids(self) -> set[RequestId]:
        """Return the requests that have not ended."""
        return set(self._state.jobs)

    def block_hashes(self, request_id: RequestId, block_size: int) -> Sequence[BlockHash]:
        """Return the hashes of the full blocks that a request begins with; none of one that has ended."""
        job = self._state.jobs.get(request_id)
        return job.seqs[0].block_hashes(block_size) if job is not None else ()

    # ---- steps

    def plan(self, lane_id: LaneId, now_ms: int) -> tuple[StepPlan | None, list[TokenRun]]:
        """Plan the lane's next step; None when there is nothing to do, or two steps are in flight.

        Also returns the ends of sequences for which there was no room even alone.
        """
        lane = self._state.lanes[lane_id]
        if not lane.can_plan():
            return None, []
        planner = StepPlanner(self._state, lane, now_ms)
        planner.plan()
        withdraw_evicted(self._state, lane)
        if planner.draft.is_empty and not lane.kv.relocations and (lane.in_flight or not lane.has_news()):
            lane.discard(planner.draft)
            return None, planner.runs
        self._state.counters.steps += 1
        return lane.finish(planner.draft), planner.runs

    def may_plan(self, lane_id: LaneId) -> bool:
        """Return whether planning the lane could give a step, as far as can be told without planning."""
        lane = self._state.lanes[lane_id]
        return lane.can_plan() and bool(self._state.queue or lane.num_rows or lane.has_news())

    def take_called(self) -> list[LaneId]:
        """Return the lanes that have become the best ones for something that waits, once: plan them."""
        called = self._state.router.called
        lane_ids = list(called)
        called.clear()
        return lane_ids

    def apply(self, lane_id: LaneId, result: StepResult) -> list[TokenRun]:
        """Take the result of the lane's oldest step in flight. What belongs to an older seq_epoch is ignored."""
        return results.apply_result(self._state, self._state.lanes[lane_id], result)

    # ---- figures

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return self._state.counters

    @property
    def num_waiting_seqs(self) -> int:
        """Sequences in the queue, and those that wait for their request's leader."""
        return self._state.num_waiting_seqs

    @property
    def num_running_seqs(self) -> int:
        """Sequences that are rows of a lane."""
        return self._state.num_running_seqs

    def num_rows(self, lane_id: LaneId) -> int:
        """Return how many sequences run on a lane."""
        return self._state.lanes[lane_id].num_rows

    def lane_stats(self, lane_id: LaneId) -> LaneStats:
        """Return a lane's figures."""
        return self._state.lanes[lane_id].stats()

    def check_integrity(self) -> None:
        """Raise AssertionError when any two parts of the state disagree. O(everything), for tests."""
        self._state.check_integrity()
