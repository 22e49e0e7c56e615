"""How many long sequences run at once where native KV holds 8 of 4,000 tokens, and how fast they decode.

In each format more requests are sent than fit. The rows that run when nobody more is let in are counted; from then on,
until the first of them ends, nothing but decoding is done, and output tokens are counted by the second.
"""

import asyncio
from dataclasses import dataclass

from bench.cell import Cell
from bench.client import Server, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_least, say, spread
from bench.watch import Watch
from bench.workload import Job, Lengths, Workload
from protos import scheduler_pb2

PROMPT_TOKENS, OUTPUT_TOKENS = 3584, 416  # outputs go on while all others' prompts are computed
NATIVE_SEQUENCES = 8
BLOCK_SIZE = 16
BLOCK_BYTES = {"bfloat16": 368_640, "float32": 737_280}  # native, all layers of the bundled model
SENT = 30
VOCAB_SIZE = 49_000
WORKLOAD = Workload(
    SENT, Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS), vocab_size=VOCAB_SIZE
)
# Against native.
ROWS_GOALS = {"int8": 1.75, "mixed": 2.25, "int4": 2.75}
RATE_GOALS = {"int8": 1.2}
MIN_DECODE_S = 2.0


@dataclass(frozen=True, slots=True)
class Plateau:
    """A time in which the same rows run and no prompt is computed."""

    num_rows: int
    duration_s: float
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all rows together, by the second."""
        return self.num_tokens / self.duration_s


class Rows:
    """The most rows that ran at once, and the plateau of the most rows that lasted for MIN_DECODE_S."""

    def __init__(self) -> None:
        self.most = 0
        self.num_preemptions = 0
        self.plateau: Plateau | None = None
        self.is_over = False  # rows end, and there is a plateau
        self._begin: tuple[float, scheduler_pb2.CellStats] | None = None

    def look(self, now_s: float, stats: scheduler_pb2.CellStats) -> None:
        """Take a cell's figures in."""
        num_rows = stats.num_running_seqs
        self.most, self.num_preemptions = max(self.most, num_rows), stats.num_preemptions_total
        if self._begin is None or self._shape(stats) != self._shape(self._begin[1]):
            self._begin = now_s, stats
        begin_s, begin = self._begin
        if now_s - begin_s >= MIN_DECODE_S and num_rows and (self.plateau is None or num_rows >= self.plateau.num_rows):
            num_tokens = stats.num_output_tokens_total - begin.num_output_tokens_total
            self.plateau = Plateau(num_rows, now_s - begin_s, num_tokens)
        self.is_over = self.plateau is not None and num_rows < self.plateau.num_rows

    @staticmethod
    def _shape(stats: scheduler_pb2.CellStats) -> tuple[int, int]:
        return stats.num_running_seqs, stats.num_prompt_tokens_total


async def count_rows(settings: CompareSettings, kv_cache_dtype: str, jobs: list[Job]) -> Rows:
    """Send the jobs to a cell of its own, and break them off when rows end."""
    memory_bytes = NATIVE_SEQUENCES * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE) * BLOCK_BYTES[settings.dtype]
    rows = Rows()
    with Cell(
        model=settings.model,
        dtype=settings.dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=memory_bytes,
        enable_prefix_caching=False,
    ) as cell:
        server = Server(cell.url, await find_model(cell.url))
        with Watch(cell, rows.look):
            load = asyncio.create_task(run_closed_loop(server, jobs, len(jobs)))
            while not rows.is_over and not load.done():  # noqa: ASYNC110  # another thread tells
                await asyncio.sleep(0.1)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return rows


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Count each format's rows in turn."""
    jobs = WORKLOAD.jobs(lengths_seed=1)
    rows: dict[str, list[float]] = {dtype: [] for dtype in ("auto", *ROWS_GOALS)}
    rates: dict[str, list[float]] = {dtype: [] for dtype in rows}
    for _ in range(repeats):
        for dtype in rows:
            counted = await count_rows(settings, dtype, jobs)
            assert counted.plateau is not None, "rows ended before all that fit had been let in"
            rows[dtype].append(counted.most)
            rates[dtype].append(counted.plateau.tokens_per_s)
            say(
                f"{dtype}: {counted.most} rows at once, {counted.num_preemptions} preemptions; {rates[dtype][-1]:.1f} "
                f"tokens/s while {counted.plateau.num_rows} decode, over {counted.plateau.duration_s:.1f} s"
            )
    for dtype in ROWS_GOALS:
        say(f"decode rate of {dtype} against native: {spread(_ratios(rates, dtype))} x")
    return [
        *(
            at_least(f"rows at once, {dtype} / native", _ratios(rows, dtype), goal)
            for dtype, goal in ROWS_GOALS.items()
        ),
        *(
            at_least(f"decode tokens/s, {dtype} / native", _ratios(rates, dtype), goal)
            for dtype, goal in RATE_GOALS.items()
        ),
    ]


def _ratios(values: dict[str, list[float]], dtype: str) -> list[float]:
    return [value / native for value, native in zip(values[dtype], values["auto"], strict=True)]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
