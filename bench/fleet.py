"""A fleet of simulated workers in virtual time under the real core, for `bench.simulate`.

    arrivals ──▶ core ──plan──▶ worker: two steps in flight, one running     step time from a model of an accelerator
                  ▲                        │
                  └────────apply───────────┘

Lanes are planned when the scheduler process would plan them: after their own results, and when the core calls them.
Only the core's own time is real: it is measured around each call.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from typing import TypeVar

from bench.fake_worker import FakeWorker
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import LaneId, LaneSpec, Request, RequestId, StepResult, TokenRun
from scheduler_svc.index.memory import MemoryIndex

_T = TypeVar("_T")
_BLOCK_SIZE = 16


class Spread(Enum):
    """Who gets which request."""

    PREFIX_AWARE = "prefix-aware"  # one core, which sees all workers' tables and binds late
    FEWEST = "fewest"  # the others: at arrival, as a balancer before independent servers does
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A model of 8 billion parameters in bf16 on an accelerator with 80 GB at 3.35 TB/s and 1 PFLOP/s, both at 75 %."""

    launch_ms: float = 2.0
    weights_ms: float = 16e9 / 2.5e12 * 1e3
    prefill_token_ms: float = 2 * 8e9 / 0.75e15 * 1e3
    context_token_ms: float = 131_072 / 2.5e12 * 1e3
    kv_tokens: int = 400_000
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    def step_ms(self, num_prefill_tokens: int, num_context_tokens: int) -> float:
        """Return the time of a step that computes so many prompt tokens and reads so many tokens of KV."""
        compute_ms = self.prefill_token_ms * num_prefill_tokens
        return self.launch_ms + max(self.weights_ms, compute_ms) + self.context_token_ms * num_context_tokens

    def spec(self) -> LaneSpec:
        """Return what such a worker offers."""
        num_blocks = self.kv_tokens // _BLOCK_SIZE
        return LaneSpec(num_blocks, 16, _BLOCK_SIZE, self.max_num_seqs, self.max_num_batched_tokens, 32_768)


@dataclass(slots=True)
class Progress:
    """One request as its client sees it; times in virtual ms."""

    arrival_ms: float
    first_token_ms: float | None = None
    end_ms: float | None = None
    num_output_tokens: int = 0


class TimedCore:
    """A scheduler's core, and the real time that it has taken."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_queued_seqs=1_000_000, max_num_seqs=1024), MemoryIndex())
        self.cpu_s = 0.0
        self.num_open = 0  # requests that have not ended

    def timed(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns, its time counted."""
        begin_ns = time.thread_time_ns()
        result = call()
        self.cpu_s += (time.thread_time_ns() - begin_ns) / 1e9
        return result


@dataclass(slots=True)
class Lane:
    """A worker, the results of its steps in flight, and when it is free."""

    core: TimedCore
    lane_id: LaneId
    worker: FakeWorker = field(default_factory=FakeWorker)
    results: deque[StepResult] = field(default_factory=deque)
    free_at_ms: float = 0.0
    busy_ms: float = 0.0


class Fleet:
    """Workers under one core, or under one core each, and the requests that come to them."""

    def __init__(self, num_workers: int, spread: Spread, seed: int) -> None:
        self.progress: dict[RequestId, Progress] = {}
        self.num_steps = self.num_row_steps = 0
        self.num_output_tokens_at: Counter[int] = Counter()  # by the second of virtual time
        self._spread = spread
        self._rng = random.Random(seed)
        self._accelerator = Accelerator()
        self._now_ms = 0.0
        self._events: list[tuple[float, int, Lane]] = []  # ends of steps
        self.cores = [TimedCore() for _ in range(1 if spread is Spread.PREFIX_AWARE else num_workers)]
        self.lanes = [Lane(self.cores[i % len(self.cores)], LaneId(f"w{i}")) for i in range(num_workers)]
        self._lane_of = {lane.lane_id: lane for lane in self.lanes}
        self._core_of: dict[RequestId, TimedCore] = {}
        for lane in self.lanes:
            lane.core.scheduler.add_lane(lane.lane_id, self._accelerator.spec())

    def run(self, requests: Iterable[tuple[float, Request]]) -> None:
        """Send the requests at their times (ms) and return when all have ended."""
        for arrival_ms, request in requests:
            self._run_until(arrival_ms)
            self._now_ms = arrival_ms
            core = self._pick()
            core.num_open += 1
            self.progress[request.request_id] = Progress(arrival_ms)
            self._core_of[request.request_id] = core
            self._take(core.timed(partial(core.scheduler.submit, request)))
            self._plan_called(core)
        self._run_until(float("inf"))
        assert not self._core_of, "requests never ended"

    def _pick(self) -> TimedCore:
        match self._spread:
            case Spread.PREFIX_AWARE:
                return self.cores[0]
            case Spread.RANDOM:
                return self._rng.choice(self.cores)
            case Spread.ROUND_ROBIN:
                return self.cores[len(self.progress) % len(self.cores)]
            case Spread.FEWEST:
                return min(self.cores, key=lambda core: core.num_open)

    def _run_until(self, end_ms: float) -> None:
        while self._events and self._events[0][0] <= end_ms:
            self._now_ms, _, lane = heappop(self._events)
            core = lane.core
            self._take(core.timed(partial(core.scheduler.apply, lane.lane_id, lane.results.popleft())))
            self._plan(lane)
            self._plan_called(core)

    def _plan_called(self, core: TimedCore) -> None:
        while lane_ids := core.scheduler.take_called():
            for lane_id in lane_ids:
                self._plan(self._lane_of[lane_id])

    def _plan(self, lane: Lane) -> None:
        """Keep two steps in flight."""
        core = lane.core
        while len(lane.results) < 2:
            plan, runs = core.timed(partial(core.scheduler.plan, lane.lane_id, int(self._now_ms)))
            self._take(runs)
            if plan is None:
                return
            lane.results.append(lane.worker.run(plan))
            step_ms = self._accelerator.step_ms(lane.worker.num_prefill_tokens, lane.worker.num_context_tokens)
            lane.free_at_ms = max(lane.free_at_ms, self._now_ms) + step_ms
            lane.busy_ms += step_ms
            self.num_steps += 1
            self.num_row_steps += (
                len(plan.settled_seq_ids) + len(plan.continued_rows) + len(plan.new_rows) + len(plan.resumed_rows)
            )
            heappush(self._events, (lane.free_at_ms, self.num_steps, lane))

    def _take(self, runs: Sequence[TokenRun]) -> None:
        num_output_tokens = 0
        for run in runs:
            progress = self.progress[run.request_id]
            if run.token_ids:
                progress.num_output_tokens += len(run.token_ids)
                num_output_tokens += len(run.token_ids)
                if progress.first_token_ms is None:
                    progress.first_token_ms = self._now_ms
            if run.finish_reason is not None:
                progress.end_ms = self._now_ms
                self._core_of.pop(run.request_id).num_open -= 1
        self.num_output_tokens_at[int(self._now_ms / 1e3)] += num_output_tokens
