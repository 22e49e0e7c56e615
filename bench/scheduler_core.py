"""What a step costs the scheduler's core: microseconds of plan and apply, at 8, 64 and 256 decoding rows.

A FakeWorker answers every step, two in flight; its own time is not counted. Three cases: rows that decode on and on,
the same with blocks that are narrowed as they age, and rows that come and go (128 output tokens each, and a new prompt
of 128 tokens for each that ends). Then the first and the last with 16 workers of 64 rows each, so that each new request
is routed among all.
"""

import time
from collections import deque
from statistics import mean

from bench.compare import CompareSettings, run_comparison
from bench.fake_worker import FakeWorker, make_request
from bench.report import Finding, at_most, say, spread
from scheduler_svc.collector import collect_rarely
from scheduler_svc.core.precision import NATIVE_ONLY, PrecisionPolicy, parse_policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    Format,
    LaneId,
    LaneSpec,
    StepResult,
    TokenRun,
)
from scheduler_svc.index.memory import MemoryIndex

ROWS = (8, 64, 256)
PROMPT_TOKENS, CHURN_OUTPUT_TOKENS, ENDLESS_TOKENS = 128, 128, 100_000
STEPS = 400
FLEET_WORKERS, FLEET_ROWS, FLEET_STEPS = 16, 64, 150


class Bench:
    """A scheduler with lanes of a number of rows, all of which run."""

    def __init__(
        self, num_rows: int, output_tokens: int, precision: PrecisionPolicy = NATIVE_ONLY, num_lanes: int = 1
    ) -> None:
        self._output_tokens = output_tokens
        self._num_submitted = 0
        self._workers = {LaneId(f"w{lane_idx}"): FakeWorker() for lane_idx in range(num_lanes)}
        self._results: dict[LaneId, deque[StepResult]] = {lane_id: deque() for lane_id in self._workers}
        self._core_ns = 0
        num_seqs = num_rows * num_lanes
        config = SchedulerConfig(max_num_seqs=num_rows, max_queued_seqs=num_seqs, precision=precision)
        self._scheduler = Scheduler(config, MemoryIndex())
        longest = PROMPT_TOKENS + min(output_tokens, 3 * STEPS)
        spec = LaneSpec(
            num_blocks=num_rows * (longest // 16 + 2) // 16 * 16 + 16,
            blocks_per_slab=16,
            block_size=16,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(512, 2 * num_rows),
            max_model_len=2 * ENDLESS_TOKENS,
            quantized_blocks_per_slab={Format.INT8: 31, Format.INT4: 49},
        )
        for lane_id in self._workers:
            self._scheduler.add_lane(lane_id, spec)
        for _ in range(num_seqs):
            self._submit()
        # Until every row decodes, and with rows that come and go until they do so at different times.
        for _ in range(2 * num_rows + 2 * CHURN_OUTPUT_TOKENS if output_tokens < ENDLESS_TOKENS else 2 * num_rows):
            self.step_us()

    def step_us(self) -> float:
        """Run a step of each lane, two being in flight; return the microseconds of CPU that the core took."""
        self._core_ns = 0
        for lane_id, results in self._results.items():
            if results:
                begin_ns = time.thread_time_ns()
                self._replace(self._scheduler.apply(lane_id, results.popleft()))
                self._core_ns += time.thread_time_ns() - begin_ns
            self._plan(lane_id)
            for called_id in self._scheduler.take_called():
                self._plan(called_id)
        return self._core_ns / 1e3

    def _plan(self, lane_id: LaneId) -> None:
        """Keep two steps of a lane in flight."""
        results = self._results[lane_id]
        while len(results) < 2:
            begin_ns = time.thread_time_ns()
            plan, _ = self._scheduler.plan(lane_id, now_ms=0)
            self._core_ns += time.thread_time_ns() - begin_ns
            if plan is None:
                return
            results.append(self._workers[lane_id].run(plan))

    def _replace(self, runs: list[TokenRun]) -> None:
        for run in runs:
            if run.finish_reason is not None:
                self._submit()

    def _submit(self) -> None:
        self._num_submitted += 1
        first = 1000 * self._num_submitted
        prompt = list(range(first, first + PROMPT_TOKENS))
        self._scheduler.submit(make_request(str(self._num_submitted), prompt, self._output_tokens))


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Measure every number of rows, in turn, with the scheduler process's own garbage collection."""
    collect_rarely()
    findings = []
    for num_rows in ROWS:
        steady: list[float] = []
        churn: list[float] = []
        narrowed: list[float] = []
        cases = (
            (steady, ENDLESS_TOKENS, NATIVE_ONLY),
            (churn, CHURN_OUTPUT_TOKENS, NATIVE_ONLY),
            (narrowed, ENDLESS_TOKENS, parse_policy("native:1,int8:4,int4")),
        )
        for _ in range(repeats):
            for times_us, output_tokens, precision in cases:
                bench = Bench(num_rows, output_tokens, precision)
                times_us.append(mean(bench.step_us() for _ in range(STEPS)))
        say(f"{num_rows} rows that come and go: {spread(churn)} us a step")
        say(f"{num_rows} decoding rows, each block narrowed twice: {spread(narrowed)} us a step")
        findings.append(at_most(f"scheduler core, {num_rows} decoding rows", steady, 50 + 5 * num_rows, "us a step"))
    return [*findings, *measure_fleet(repeats)]


def measure_fleet(repeats: int) -> list[Finding]:
    """Measure a cell of many workers."""
    cases = {"decoding rows": ENDLESS_TOKENS, "rows that come and go": CHURN_OUTPUT_TOKENS}
    row_us: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, output_tokens in cases.items():
            bench = Bench(FLEET_ROWS, output_tokens, num_lanes=FLEET_WORKERS)
            step_us = mean(bench.step_us() for _ in range(FLEET_STEPS))
            row_us[name].append(step_us / (FLEET_WORKERS * FLEET_ROWS))
    fleet = f"{FLEET_WORKERS} workers x {FLEET_ROWS}"
    return [at_most(f"scheduler core, {fleet} {name}", us, 5, "us a row and step") for name, us in row_us.items()]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=5)
