"""How many long sequences run at once where native KV holds 8 of 4,000 tokens, and how fast they decode.

In each format more requests are sent than fit. The rows that run when nobody more is let in are counted; from then on,
until the first of them ends, nothing but decoding is done, and output tokens are counted by the second.
"""

import asyncio
from dataclasses import dataclass, field
from statistics import median

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


@dataclass(slots=True)
class Plateau:
    """The time in which the most rows run and no prompt is computed."""

    num_rows: int = 0
    num_prompt_tokens: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)  # (time, output tokens until then)
    is_over: bool = False
    num_preemptions: int = 0

    def look(self, now_s: float, stats: scheduler_pb2.CellStats) -> None:
        """Take a cell's figures in. The plateau is over when a row ends."""
        if self.is_over:
            return
        if self.samples and self.duration_s > MIN_DECODE_S and stats.num_running_seqs < self.num_rows:
            self.is_over = True
            return
        if stats.num_running_seqs != self.num_rows or stats.num_prompt_tokens_total != self.num_prompt_tokens:
            self.num_rows, self.num_prompt_tokens = stats.num_running_seqs, stats.num_prompt_tokens_total
            self.samples = []
        self.num_preemptions = stats.num_preemptions_total
        self.samples.append((now_s, stats.num_output_tokens_total))

    @property
    def duration_s(self) -> float:
        """How long it has lasted."""
        return self.samples[-1][0] - self.samples[0][0]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all rows together, by the second."""
        return (self.samples[-1][1] - self.samples[0][1]) / self.duration_s


async def find_plateau(settings: CompareSettings, kv_cache_dtype: str, jobs: list[Job]) -> Plateau:
    """Send the jobs to a cell of its own, and break them off when the plateau is over."""
    memory_bytes = NATIVE_SEQUENCES * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE) * BLOCK_BYTES[settings.dtype]
    plateau = Plateau()
    with Cell(
        model=settings.model,
        dtype=settings.dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=memory_bytes,
        enable_prefix_caching=False,
    ) as cell:
        server = Server(cell.url, await find_model(cell.url))
        with Watch(cell, plateau.look):
            load = asyncio.create_task(run_closed_loop(server, jobs, len(jobs)))
            while not plateau.is_over and not load.done():  # noqa: ASYNC110  # another thread tells
                await asyncio.sleep(0.1)
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    return plateau


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Find each format's plateau in turn."""
    jobs = WORKLOAD.jobs(lengths_seed=1)
    plateaus: dict[str, list[Plateau]] = {"auto": [], **{dtype: [] for dtype in ROWS_GOALS}}
    for _ in range(repeats):
        for dtype, found in plateaus.items():
            plateau = await find_plateau(settings, dtype, jobs)
            found.append(plateau)
            say(
                f"{dtype}: {plateau.num_rows} rows at once, {plateau.tokens_per_s:.1f} tokens/s over "
                f"{plateau.duration_s:.1f} s, {plateau.num_preemptions} preemptions"
            )
    native = plateaus.pop("auto")
    rows = {
        dtype: [p.num_rows / n.num_rows for p, n in zip(found, native, strict=True)]
        for dtype, found in plateaus.items()
    }
    rates = {
        dtype: [p.tokens_per_s / n.tokens_per_s for p, n in zip(found, native, strict=True)]
        for dtype, found in plateaus.items()
    }
    for dtype, ratios in rates.items():
        say(f"decode rate of {dtype} against native: {spread(ratios)} x, at {median(rows[dtype]):.3g} x the rows")
    return [
        *(at_least(f"rows at once, {dtype} / native", rows[dtype], goal) for dtype, goal in ROWS_GOALS.items()),
        *(at_least(f"decode tokens/s, {dtype} / native", rates[dtype], goal) for dtype, goal in RATE_GOALS.items()),
    ]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
