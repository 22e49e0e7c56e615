"""Any order of events: the core keeps its books, every sequence ends exactly once, and no text is ever disturbed.

One rule for each thing that can happen; `DisturbedCell` says what the clients are owed.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.ends import MAX_HOMELESS_MS
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.precision import NATIVE_ONLY, parse_policy
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    BeamParams,
    Delivered,
    ErrorCode,
    FairnessPolicy,
    FinishReason,
    Format,
    LaneId,
    Request,
    RequestId,
    SchedulerError,
)
from tests.scheduler.core.disturbed_cell import DisturbedCell
from tests.scheduler.core.fake_worker import POISON_SEED
from tests.scheduler.core.helpers import make_mixed_spec, make_request, make_spec

W0, W1 = LaneId("w0"), LaneId("w1")

CALM_STEPS = 5

PRECISIONS = [
    parse_policy("native:1,int8"),
    parse_policy("native:2,int4"),
    parse_policy("native:1,int8:2,int4"),
    parse_policy("native:3,int8", "int4"),
    parse_policy("native", "int8"),  # narrowed under pressure only
]

configs = st.builds(
    SchedulerConfig,
    max_queued_seqs=st.sampled_from([6, 1000, 1000]),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(SchedulingPolicy),
    precision=st.sampled_from([NATIVE_ONLY, NATIVE_ONLY, *PRECISIONS]),
    fairness=st.builds(
        FairnessPolicy,
        st.sampled_from([{}, {"a": 2.0, "b": 0.5}]),
        st.sampled_from([None, None, None, 1, 3]),
        st.sampled_from([None, None, None, 0.3, 0.6]),
    ),
)

prompts = st.builds(
    # Prompts that share beginnings: a common head, then a tail of one token value.
    lambda head, tail_token, tail: [*range(head), *[tail_token] * tail],
    st.integers(0, 14),
    st.integers(20, 22),
    st.integers(1, 9),
)

requests = st.builds(
    partial(make_request, "without a name"),
    prompts,
    max_tokens=st.integers(1, 40),
    n=st.integers(1, 3),
    beams=st.sampled_from([None, None, BeamParams(), BeamParams(-1.0), BeamParams(2.5)]),
    seed=st.integers(0, 1),
    stops=st.frozensets(st.integers(0, 49), max_size=4),
    tenant=st.sampled_from(["a", "b", "c"]),
    priority=st.integers(0, 1),
    deadline_ms=st.sampled_from([*[None] * 6, 2000, 8000]),  # from when it is submitted
    skip_cache_read=st.booleans(),
    floor=st.sampled_from([None, None, Format.NATIVE, Format.INT8]),
)


class CellMachine(RuleBasedStateMachine):
    """Requests come, steps are planned, applied, lost and broken; workers, the scheduler and gateways come and go."""

    cell: DisturbedCell
    num_requests = 0
    num_poisons = 0
    num_steps_at_loss = 0

    def _is_calm(self) -> bool:
        """Whether some steps were applied since all rows were lost: else nothing would ever get far."""
        return self.cell.num_applied >= self.num_steps_at_loss + CALM_STEPS

    def _note_loss(self) -> None:
        self.num_steps_at_loss = self.cell.num_applied

    @initialize(
        config=configs,
        nums_blocks=st.tuples(st.integers(6, 20), st.integers(6, 20)),
        nums_slabs=st.tuples(st.integers(6, 16), st.integers(6, 16)),
        has_alike_workers=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(3, 20),
        max_model_len=st.sampled_from([60, 60, 60, 20]),
    )
    def start(
        self,
        config: SchedulerConfig,
        nums_blocks: tuple[int, int],
        nums_slabs: tuple[int, int],
        has_alike_workers: bool,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
    ) -> None:
        make, sizes = (make_spec, nums_blocks) if config.precision == NATIVE_ONLY else (make_mixed_spec, nums_slabs)
        first, second = (
            make(size, max_num_seqs=max_num_seqs, budget=budget, max_model_len=max_model_len) for size in sizes
        )
        self.cell = DisturbedCell.make(config, {W0: first, W1: first if has_alike_workers else second})

    # ---- requests

    @rule(
        request=requests,
        num_delivered=st.sampled_from([None, None, None, 0, 2, 5]),
        sample=st.integers(0, 2),
        num_alike=st.integers(1, 4),
    )
    def submit(self, request: Request, num_delivered: int | None, sample: int, num_alike: int) -> None:
        """New requests, or such that another scheduler had before: past the queue's bound."""
        for _ in range(num_alike):
            self._submit(self._named(request), num_delivered, sample % request.n)

    def _submit(self, request: Request, num_delivered: int | None, sequence_idx: int) -> None:
        if num_delivered is not None:
            text = self.cell.expected(request, sequence_idx)
            delivered = Delivered(tuple(text[:num_delivered]))
            if request.beam_search is not None:  # all of an answer, or nothing
                delivered = Delivered(tuple(text), FinishReason.STOP)
            request = replace(request, is_resubmit=True, delivered={sequence_idx: delivered})
        allowed = {ErrorCode.INVALID_ARGUMENT} | ({ErrorCode.RESOURCE_EXHAUSTED} if num_delivered is None else set())
        try:
            self.cell.submit(request)
        except SchedulerError as error:
            if error.code not in allowed:
                raise

    @precondition(lambda self: not self.num_poisons and self._is_calm())
    @rule()
    def submit_poison(self) -> None:
        """A request that kills every worker that computes it."""
        self.num_poisons += 1
        with suppress(SchedulerError):
            self.cell.submit(self._named(make_request("", [0, 1, 2, 3, 40], seed=POISON_SEED)))

    def _named(self, request: Request) -> Request:
        self.num_requests += 1
        deadline_ms = None if request.deadline_ms is None else self.cell.now_ms + request.deadline_ms
        return replace(request, request_id=RequestId(f"r{self.num_requests}"), deadline_ms=deadline_ms)

    @rule(number=st.integers(1, 20), sequence_idx=st.sampled_from([None, 0, 1, 2]))
    def abort(self, number: int, sequence_idx: int | None) -> None:
        self.cell.abort(f"r{number}", sequence_idx)

    @rule(elapsed_ms=st.sampled_from([10, 100, 1000]))
    def time_passes(self, elapsed_ms: int) -> None:
        self.cell.expire(elapsed_ms)

    @precondition(lambda self: self.cell.requests)
    @rule(choice=st.integers(0, 7), num_kept_tokens=st.integers(0, 6))
    def gateway_submits_again(self, choice: int, num_kept_tokens: int) -> None:
        names = sorted(self.cell.requests)
        self.cell.lose_delivered(names[choice % len(names)], num_kept_tokens)

    # ---- steps

    @rule(choice=st.integers(0, 7))
    def plan(self, choice: int) -> None:
        if self.cell.workers:
            self.cell.plan(self._pick(choice))

    @rule(
        choice=st.integers(0, 7),
        fails=st.sampled_from([*[False] * 7, True]),
        failing_row_idx=st.sampled_from([*[None] * 7, 0, 1]),
    )
    def apply(self, choice: int, fails: bool, failing_row_idx: int | None) -> None:
        busy = sorted(lane_id for lane_id, steps in self.cell.in_flight.items() if steps)
        if busy:
            self.cell.apply(busy[choice % len(busy)], fails=fails, failing_row_idx=failing_row_idx)

    @rule(num_rounds=st.integers(1, 20))
    def all_goes_well(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            for lane_id in sorted(self.cell.workers):
                self.cell.plan(lane_id)
                if self.cell.in_flight[lane_id]:
                    self.cell.apply(lane_id)

    # ---- workers

    @precondition(lambda self: len(self.cell.workers) < 2)
    @rule()
    def worker_comes(self) -> None:
        """A new worker, or one that was lost and has restarted."""
        self.cell.join(W0 if W0 not in self.cell.workers else W1)

    @precondition(lambda self: self.cell.workers and self._is_calm())
    @rule(choice=st.integers(0, 7))
    def worker_dies(self, choice: int) -> None:
        self._note_loss()
        self.cell.drop_lane(self._pick(choice))

    @precondition(lambda self: self.cell.workers and self._is_calm())
    @rule(choice=st.integers(0, 7), num_run=st.integers(0, 2))
    def worker_comes_back(self, choice: int, num_run: int) -> None:
        """One that stood still, was given up, and registers in a new epoch: its results of the old one are refused."""
        self._note_loss()
        self.cell.return_worker(self._pick(choice), num_run)

    @precondition(lambda self: self.cell.workers and self._is_calm())
    @rule(choice=st.integers(0, 7))
    def worker_drains(self, choice: int) -> None:
        self._note_loss()
        self.cell.drain(self._pick(choice))

    @precondition(lambda self: self.cell.draining)
    @rule()
    def drained_workers_leave(self) -> None:
        self.cell.leave()

    # ---- the scheduler

    @precondition(_is_calm)
    @rule(num_run=st.integers(0, 2), lost=st.sampled_from([None, None, W0, W1]), requests_first=st.booleans())
    def scheduler_restarts(self, num_run: int, lost: LaneId | None, requests_first: bool) -> None:
        self._note_loss()
        self.cell.restart_scheduler(num_run, lambda lane_id: lane_id != lost, requests_first=requests_first)

    @rule(says=st.sampled_from(["truth", "nothing", "everything"]))
    def index_changes_its_mind(self, says: str) -> None:
        self.cell.index.says = says

    # ---- what holds

    @invariant()
    def scheduler_has_what_has_not_ended(self) -> None:
        if hasattr(self, "cell"):
            self.cell.check_requests()

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        for lane_id in (W0, W1):
            if lane_id not in self.cell.workers:
                self.cell.join(lane_id)
            elif lane_id in self.cell.draining:
                self.cell.return_worker(lane_id, 0)
        # What was delivered may make a request too long for every lane: it waits a minute. All else ends by itself.
        self.cell.expire()
        self.cell.expire(MAX_HOMELESS_MS)
        self.cell.run_to_end()
        assert all(client.end is not None for client in self.cell.clients.values())
        self.cell.expire()
        assert not self.cell.queue.num_tenants, "nobody is there, and somebody has a record"
        for lane_id, spec in self.cell.specs.items():
            stats = self.cell.scheduler.lane_stats(lane_id)
            assert (stats.num_running_seqs, stats.num_quarantined_blocks) == (0, 0)
            assert not any(stats.num_referenced_blocks), "a block leaked"
            if not spec.quantized_blocks_per_slab:
                assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a block leaked"

    def _pick(self, choice: int) -> LaneId:
        lane_ids = sorted(self.cell.workers)
        return lane_ids[choice % len(lane_ids)]


CellMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCell = CellMachine.TestCase
