"""What a step costs the scheduler's core: microseconds of plan and apply, at 8, 64 and 256 decoding rows.

A FakeWorker answers every step at once; its own time is not counted. Three cases: rows that decode on and on, the same
with blocks that are narrowed as they age, and rows that come and go (128 output tokens each, and a new prompt of 128
tokens for each that ends).
"""

import time
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
    TokenRun,
)
from scheduler_svc.index.memory import MemoryIndex

LANE = LaneId("bench")
ROWS = (8, 64, 256)
PROMPT_TOKENS, CHURN_OUTPUT_TOKENS, ENDLESS_TOKENS = 128, 128, 100_000
STEPS = 400


class Bench:
    """A scheduler with one lane and a number of rows."""

    def __init__(self, num_rows: int, output_tokens: int, precision: PrecisionPolicy = NATIVE_ONLY) -> None:
        self._output_tokens = output_tokens
        self._num_submitted = 0
        self._worker = FakeWorker()
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=num_rows, max_queued_seqs=num_rows, precision=precision), MemoryIndex()
        )
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
        self._scheduler.add_lane(LANE, spec)
        for _ in range(num_rows):
            self._submit()
        # Until every row decodes, and with rows that come and go until they do so at different times.
        for _ in range(2 * num_rows + 2 * CHURN_OUTPUT_TOKENS if output_tokens < ENDLESS_TOKENS else 2 * num_rows):
            self.step_us()

    def step_us(self) -> float:
        """Run one step; return the core's microseconds: plan, apply, and submitting a request for each that ended."""
        begin_ns = time.perf_counter_ns()
        plan, _ = self._scheduler.plan(LANE, now_ms=0)
        planned_ns = time.perf_counter_ns()
        assert plan is not None
        result = self._worker.run(plan)
        answered_ns = time.perf_counter_ns()
        runs = self._scheduler.apply(LANE, result)
        self._replace(runs)
        return (time.perf_counter_ns() - answered_ns + planned_ns - begin_ns) / 1e3

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
    return findings


if __name__ == "__main__":
    run_comparison(measure, default_repeats=5)
