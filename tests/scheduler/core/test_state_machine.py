"""Any order of events: the core keeps its books, every sequence ends exactly once, and no text is ever disturbed."""

from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_svc.core.ends import MAX_HOMELESS_MS
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.precision import NATIVE_ONLY, PrecisionPolicy, parse_policy
from scheduler_svc.core.types import BeamParams, Delivered, FairnessPolicy, FinishReason, Format, SchedulerError
from tests.scheduler.core.helpers import Cell, expected_of, make_cell, make_mixed_spec, make_request, make_spec

PRECISIONS = [
    parse_policy("native:1,int8"),
    parse_policy("native:2,int4"),
    parse_policy("native:1,int8:2,int4"),
    parse_policy("native:3,int8", "int4"),
    parse_policy("native", "int8"),  # narrowed under pressure only
]

prompts = st.builds(
    # Prompts that share beginnings: a common head, then a tail of one token value.
    lambda head, tail_token, tail: [*range(head), *[tail_token] * tail],
    st.integers(0, 14),
    st.integers(20, 22),
    st.integers(1, 9),
)


class CellMachine(RuleBasedStateMachine):
    """Requests come, steps are planned, applied, lost and broken, lanes come and go."""

    cell: Cell
    num_requests = 0

    @initialize(
        num_lanes=st.integers(1, 2),
        num_blocks=st.integers(6, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(3, 20),
        policy=st.sampled_from(SchedulingPolicy),
        prefix_caching=st.booleans(),
        num_slabs=st.integers(6, 16),
        precision=st.sampled_from([None, None, *PRECISIONS]),
        fairness=st.builds(
            FairnessPolicy,
            st.sampled_from([{}, {"a": 2.0, "b": 0.5}]),
            st.sampled_from([None, None, 1, 2]),
            st.sampled_from([None, None, 0.3, 0.6]),
        ),
    )
    def start(
        self,
        num_lanes: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        policy: SchedulingPolicy,
        prefix_caching: bool,
        num_slabs: int,
        precision: PrecisionPolicy | None,
        fairness: FairnessPolicy,
    ) -> None:
        self.spec = make_spec(num_blocks, max_num_seqs=max_num_seqs, budget=budget, max_model_len=60)
        if precision is not None:
            self.spec = make_mixed_spec(num_slabs, max_num_seqs=max_num_seqs, budget=budget, max_model_len=60)
        self.cell = make_cell(
            self.spec,
            num_lanes=num_lanes,
            policy=policy,
            prefix_caching=prefix_caching,
            precision=precision or NATIVE_ONLY,
            fairness=fairness,
        )

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        beams=st.sampled_from([None, None, BeamParams(), BeamParams(-1.0), BeamParams(2.5)]),
        seed=st.integers(0, 1),
        stops=st.frozensets(st.integers(0, 49), max_size=6),
        tenant=st.sampled_from(["a", "b", "c"]),
        priority=st.integers(0, 1),
        skip_cache_read=st.booleans(),
        has_delivered=st.booleans(),
        num_delivered=st.integers(0, 5),
        floor=st.sampled_from([None, None, Format.NATIVE, Format.INT8]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        beams: BeamParams | None,
        seed: int,
        stops: frozenset[int],
        tenant: str,
        priority: int,
        skip_cache_read: bool,
        has_delivered: bool,
        num_delivered: int,
        floor: Format | None,
    ) -> None:
        self.num_requests += 1
        request = make_request(
            f"r{self.num_requests}",
            prompt,
            max_tokens=max_tokens,
            n=n,
            beams=beams,
            seed=seed,
            stops=stops,
            tenant=tenant,
            priority=priority,
            skip_cache_read=skip_cache_read,
            floor=floor,
        )
        if has_delivered and beams is not None:  # all of an answer, or nothing
            request.delivered[0] = Delivered(tuple(expected_of(request)), FinishReason.STOP)
        elif has_delivered:
            request.delivered[0] = Delivered(tuple(expected_of(request)[:num_delivered]))
        with suppress(SchedulerError):  # larger than the pool
            self.cell.submit(request)

    @rule(number=st.integers(1, 12), sequence_idx=st.sampled_from([None, 0, 1, 2]))
    def abort(self, number: int, sequence_idx: int | None) -> None:
        self.cell.abort(f"r{number}", sequence_idx)

    @rule(choice=st.integers(0, 7))
    def plan(self, choice: int) -> None:
        if self.cell.workers:
            self.cell.plan(sorted(self.cell.workers)[choice % len(self.cell.workers)])

    @rule(choice=st.integers(0, 7), fails=st.sampled_from([False, False, False, True]))
    def apply(self, choice: int, fails: bool) -> None:
        busy = sorted(lane_id for lane_id, steps in self.cell.in_flight.items() if steps)
        if busy:
            self.cell.apply(busy[choice % len(busy)], fails=fails)

    @rule(elapsed_ms=st.integers(1, 3000))
    def time_passes(self, elapsed_ms: int) -> None:
        self.cell.expire(elapsed_ms)

    @precondition(lambda self: self.cell.workers)
    @rule(choice=st.integers(0, 7))
    def lane_dies(self, choice: int) -> None:
        self.cell.drop_lane(sorted(self.cell.workers)[choice % len(self.cell.workers)])

    @precondition(lambda self: len(self.cell.workers) < 2)
    @rule()
    def lane_comes(self) -> None:
        """A new worker, or one that was lost and registers again under its name, without its rows."""
        self.cell.add_lane("w0" if "w0" not in self.cell.workers else "w1", self.spec)

    def teardown(self) -> None:
        if not hasattr(self, "cell"):
            return
        if not self.cell.workers:
            self.lane_comes()
        # What was delivered may make a request too long for every lane: it waits a minute. All else ends by itself.
        self.cell.expire()
        self.cell.expire(MAX_HOMELESS_MS)
        self.cell.run_to_end()
        self.cell.check_texts()
        assert all(client.end is not None for client in self.cell.clients.values())
        self.cell.expire()
        assert not self.cell.scheduler.tenant_stats(), "nobody is there, and somebody has a record"
        for lane_id in self.cell.workers:
            stats = self.cell.scheduler.lane_stats(lane_id)
            assert (stats.num_running_seqs, stats.num_quarantined_blocks) == (0, 0)
            if not self.spec.quantized_blocks_per_slab:
                assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks, "a block leaked"


CellMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCell = CellMachine.TestCase
