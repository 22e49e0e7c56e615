"""More workers than any one machine has: the real core, router and index against simulated workers in virtual time.

    arrivals ──▶ core ──plan──▶ worker: two steps in flight, one running     step time from a model of an accelerator
                  ▲                        │
                  └────────apply───────────┘

Requests have prompt and output lengths as conversations have them (log-normal), and begin with one of a few long shared
prompts (Zipf). Four ways to spread them are compared: this router, which sees all lanes' tables and binds late; and
random, round robin and fewest-requests, which give a request to a worker when it comes, as a balancer before
independent servers does. Only the core's own time is real: it is measured around each call.
"""

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from statistics import mean
from typing import TypeVar

from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from bench.report import percentile, say, table
from protos.block_hash import root_hash
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    EndingRules,
    LaneId,
    LaneSpec,
    Request,
    RequestId,
    SampledRows,
    SeqId,
    StepPlan,
    StepResult,
    TokenRun,
)
from scheduler_svc.index.memory import MemoryIndex

VOCAB_SIZE = 100_000
TOKEN = 7  # what every step samples: the core does not look at it
_T = TypeVar("_T")
ROOT = root_hash(b"model", b"tenant", "")


class SimulateSettings(BaseSettings):
    """Flags of the simulation."""

    model_config = SettingsConfigDict(frozen=True, cli_kebab_case=True, cli_implicit_flags=True)

    workers: int = Field(16, ge=1, description="simulated workers")
    requests: int = Field(4000, ge=1, description="requests in all")
    rate: float = Field(0.0, ge=0, description="requests a second; 0: 8 for each worker")
    policies: str = Field("prefix-aware,fewest,round-robin,random", description="ways to spread requests, by comma")
    shared_prompts: int = Field(64, ge=0, description="shared prompts that requests begin with; 0: none")
    shared_tokens: int = Field(1000, ge=1, description="tokens of a shared prompt")
    seed: int = Field(1, description="of the workload")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A model of 8 billion parameters in bf16 on an accelerator with 80 GB at 3.35 TB/s and 1 PFLOP/s, both at 75 %."""

    launch_ms: float = 2.0
    weights_ms: float = 16e9 / 2.5e12 * 1e3
    prefill_token_ms: float = 2 * 8e9 / 0.75e15 * 1e3
    context_token_ms: float = 131_072 / 2.5e12 * 1e3
    kv_tokens: int = 400_000

    def step_ms(self, num_prefill_tokens: int, num_context_tokens: int) -> float:
        """Return the time of a step that computes so many prompt tokens and reads so many tokens of KV."""
        compute_ms = self.prefill_token_ms * num_prefill_tokens
        return self.launch_ms + max(self.weights_ms, compute_ms) + self.context_token_ms * num_context_tokens


@dataclass(slots=True)
class Row:
    """What a worker has of a sequence."""

    num_tokens: int
    num_computed: int
    seq_epoch: int


class SimulatedWorker:
    """Takes step plans and says how long each takes and what it gives."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._rows: dict[SeqId, Row] = {}

    def run(self, plan: StepPlan) -> tuple[float, StepResult]:
        """Return a step's time in ms, and its result."""
        for seq_id in plan.finished_seq_ids:
            self._rows.pop(seq_id, None)
        scheduled: list[tuple[SeqId, int]] = []
        for new in plan.new_rows:
            self._rows[new.seq_id] = Row(len(new.token_ids), new.num_computed_tokens, new.seq_epoch)
            scheduled.append((new.seq_id, new.num_scheduled_tokens))
        for resumed in plan.resumed_rows:
            self._rows[resumed.seq_id] = Row(resumed.num_tokens, resumed.num_computed_tokens, resumed.seq_epoch)
            scheduled.append((resumed.seq_id, resumed.num_scheduled_tokens))
        scheduled += [(row.seq_id, row.num_scheduled_tokens) for row in plan.continued_rows]
        scheduled += [(seq_id, 1) for seq_id in plan.settled_seq_ids]
        sampled, epochs, num_prefill, num_context = [], [], 0, 0
        for seq_id, num_tokens in scheduled:
            row = self._rows[seq_id]
            row.num_computed += num_tokens
            num_prefill += num_tokens if num_tokens > 1 else 0
            num_context += row.num_computed
            if row.num_computed == row.num_tokens:
                row.num_tokens += 1
                sampled.append(seq_id)
                epochs.append(row.seq_epoch)
        result = StepResult(plan.step_id, sampled=SampledRows(sampled, epochs, [TOKEN] * len(sampled)))
        return self._accelerator.step_ms(num_prefill, num_context), result


@dataclass(slots=True)
class Progress:
    """One request as its client sees it; times in virtual ms."""

    arrival_ms: float
    num_prompt_tokens: int
    first_token_ms: float | None = None
    end_ms: float = 0.0
    num_output_tokens: int = 0


@dataclass(slots=True)
class Lane:
    """A worker, its steps in flight, and when it is free."""

    core: "TimedCore"
    lane_id: LaneId
    worker: SimulatedWorker
    steps: deque[tuple[float, StepPlan, StepResult]] = field(default_factory=deque)
    free_at_ms: float = 0.0
    busy_ms: float = 0.0


class TimedCore:
    """A scheduler's core, and the real time that it has taken."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig(max_queued_seqs=1_000_000), MemoryIndex())
        self.cpu_s = 0.0
        self.lanes: list[Lane] = []

    def timed(self, call: Callable[[], _T]) -> _T:
        """Return what a call returns, its time counted."""
        begin_ns = time.thread_time_ns()
        result = call()
        self.cpu_s += (time.thread_time_ns() - begin_ns) / 1e9
        return result


class Simulation:
    """A fleet of workers under one core, or under one core each, and the requests that come to it."""

    def __init__(self, settings: SimulateSettings, policy: str) -> None:
        self._settings, self._policy = settings, policy
        self._rng = random.Random(settings.seed)
        self.progress: dict[RequestId, Progress] = {}
        self.num_steps = self.num_row_steps = 0
        self._now_ms = 0.0
        self._events: list[tuple[float, int, Lane]] = []
        self._num_events = 0
        accelerator = Accelerator()
        num_blocks = accelerator.kv_tokens // 16
        spec = LaneSpec(num_blocks, 16, 16, 256, 2048, 32_768)
        shared = TimedCore()
        self.lanes: list[Lane] = []
        for number in range(settings.workers):
            core = shared if policy == "prefix-aware" else TimedCore()
            lane = Lane(core, LaneId(f"w{number}"), SimulatedWorker(accelerator))
            core.scheduler.add_lane(lane.lane_id, spec)
            core.lanes.append(lane)
            self.lanes.append(lane)
        self.cores = list({id(lane.core): lane.core for lane in self.lanes}.values())
        self._open = [0] * len(self.cores)  # requests of each core that have not ended
        self._core_of: dict[RequestId, int] = {}

    def run(self, requests: Iterator[tuple[float, Request]]) -> None:
        """Send the requests at their times (ms) and return when all have ended."""
        for arrival_ms, request in requests:
            self._run_until(arrival_ms)
            self._now_ms = arrival_ms
            self.progress[request.request_id] = Progress(arrival_ms, len(request.prompt_token_ids))
            core_idx = self._pick()
            core = self.cores[core_idx]
            self._open[core_idx] += 1
            self._core_of[request.request_id] = core_idx
            self._take(core.timed(partial(core.scheduler.submit, request)))
            for lane in core.lanes:
                self._plan(lane)
        self._run_until(float("inf"))

    def _pick(self) -> int:
        match self._policy:
            case "prefix-aware":
                return 0
            case "random":
                return self._rng.randrange(len(self.cores))
            case "round-robin":
                return len(self.progress) % len(self.cores)
            case "fewest":
                return min(range(len(self.cores)), key=self._open.__getitem__)
        raise ValueError(f"there is no policy {self._policy!r}")

    def _run_until(self, end_ms: float) -> None:
        while self._events and self._events[0][0] <= end_ms:
            self._now_ms, _, lane = heappop(self._events)
            _, _, result = lane.steps.popleft()
            self._take(lane.core.timed(partial(lane.core.scheduler.apply, lane.lane_id, result)))
            self._plan(lane)

    def _plan(self, lane: Lane) -> None:
        """Keep two steps in flight."""
        while len(lane.steps) < 2:
            plan, runs = lane.core.timed(lambda: lane.core.scheduler.plan(lane.lane_id, int(self._now_ms)))
            self._take(runs)
            if plan is None:
                return
            step_ms, result = lane.worker.run(plan)
            lane.free_at_ms = max(lane.free_at_ms, self._now_ms) + step_ms
            lane.busy_ms += step_ms
            lane.steps.append((lane.free_at_ms, plan, result))
            self._num_events += 1
            heappush(self._events, (lane.free_at_ms, self._num_events, lane))
            self.num_steps += 1
            self.num_row_steps += len(plan.settled_seq_ids) + len(plan.continued_rows) + len(plan.new_rows)

    def _take(self, runs: Sequence[TokenRun]) -> None:
        for run in runs:
            progress = self.progress[run.request_id]
            if run.token_ids and progress.first_token_ms is None:
                progress.first_token_ms = self._now_ms
            progress.num_output_tokens += len(run.token_ids)
            if run.finish_reason is not None:
                progress.end_ms = self._now_ms
                self._open[self._core_of[run.request_id]] -= 1


def make_requests(settings: SimulateSettings) -> Iterator[tuple[float, Request]]:
    """Yield each request with its time of arrival in ms."""
    rng = random.Random(settings.seed)
    rate = settings.rate or 8.0 * settings.workers
    shared = [
        [rng.randrange(VOCAB_SIZE) for _ in range(settings.shared_tokens)] for _ in range(settings.shared_prompts)
    ]
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(shared))))
    now_ms = 0.0
    for number in range(settings.requests):
        now_ms += rng.expovariate(rate) * 1e3
        own = [rng.randrange(VOCAB_SIZE) for _ in range(min(4000, max(8, int(rng.lognormvariate(4.6, 1.1)))))]
        num_output = min(1500, max(4, int(rng.lognormvariate(4.9, 0.9))))
        prefix = rng.choices(shared, cum_weights=weights)[0] if shared else []
        yield (
            now_ms,
            Request(
                RequestId(f"r{number}"), [*prefix, *own], EndingRules(num_output, num_output, frozenset()), None, ROOT
            ),
        )


def figures(simulation: Simulation) -> list[str]:
    """Return a policy's row of the table."""
    progress = list(simulation.progress.values())
    assert all(p.end_ms and p.first_token_ms is not None for p in progress), "requests never ended"
    duration_s = (max(p.end_ms for p in progress) - progress[0].arrival_ms) / 1e3
    ttft_ms = [p.first_token_ms - p.arrival_ms for p in progress if p.first_token_ms is not None]
    tpot_ms = [
        (p.end_ms - p.first_token_ms) / (p.num_output_tokens - 1) for p in progress if p.first_token_ms is not None
    ]
    good = sum(first <= 1000 and each <= 50 for first, each in zip(ttft_ms, tpot_ms, strict=True))
    counters = [core.scheduler.counters for core in simulation.cores]
    queries = sum(c.prefix_cache_queries for c in counters)
    busy = [lane.busy_ms for lane in simulation.lanes]
    cpu_s = sum(core.cpu_s for core in simulation.cores)
    return [
        f"{len(progress) / duration_s:.1f}",
        f"{good / duration_s:.1f}",
        f"{percentile(ttft_ms, 0.5):.0f}",
        f"{percentile(ttft_ms, 0.99):.0f}",
        f"{percentile(tpot_ms, 0.5):.1f}",
        f"{percentile(tpot_ms, 0.99):.1f}",
        f"{100 * sum(c.prefix_cache_hits for c in counters) / queries:.0f} %",
        f"{max(busy) / mean(busy):.2f}",
        f"{1e6 * cpu_s / simulation.num_steps:.0f}",
        f"{1e6 * cpu_s / simulation.num_row_steps:.2f}",
        f"{1e6 * cpu_s / len(progress):.0f}",
    ]


HEAD = [
    "policy",
    "requests/s",
    "goodput/s",
    "TTFT p50 ms",
    "p99",
    "TPOT p50 ms",
    "p99",
    "hits",
    "busy max/mean",
    "core us/step",
    "us/row",
    "us/request",
]


def main() -> int:
    """Simulate each policy on the same requests and print a table."""
    settings = CliApp.run(SimulateSettings)
    rows = [HEAD]
    for policy in settings.policies.split(","):
        simulation = Simulation(settings, policy)
        begin_s = time.perf_counter()
        simulation.run(make_requests(settings))
        say(f"{policy}: simulated in {time.perf_counter() - begin_s:.0f} s")
        rows.append([policy, *figures(simulation)])
        if policy == "prefix-aware":
            step_s = simulation.cores[0].cpu_s / simulation.num_steps
            say(f"one core drives {0.03 / step_s:.0f} workers at steps of 30 ms, on one of this machine's cores")
    say(f"\n{settings.workers} workers, {settings.requests} requests; good: first token within 1 s, then 50 ms a token")
    say(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
