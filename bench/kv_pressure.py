"""Three times the load that native KV holds: narrowing blocks before anybody gives way, against preemption alone.

The same requests, all at once, to a cell whose blocks stay native until memory is short and then go down to int4
(`--kv-precision-floor`), and to one that can only preempt.
"""

from bench.cell import Cell
from bench.client import Server, Timing, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.kv_capacity import BLOCK_BYTES, BLOCK_SIZE, VOCAB_SIZE
from bench.report import Finding, LoadFigures, at_least, at_most, never, percentile, say
from bench.watch import Watch
from bench.workload import Lengths, Workload
from protos import scheduler_pb2

PROMPT_TOKENS, OUTPUT_TOKENS = 320, 320
HELD, SENT = 8, 24  # sequences that native blocks hold at their full length, and that are sent
WORKLOAD = Workload(
    SENT, Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS), vocab_size=VOCAB_SIZE
)
SIDES = {
    "ladder": {"kv_precision_policy": "native", "kv_precision_floor": "int4"},
    "preemption": {"kv_cache_dtype": "auto"},
}


class LastFigures:
    """The cell's figures as they were last, and blocks that were wider than the floor at the first preemption."""

    def __init__(self) -> None:
        self.stats = scheduler_pb2.CellStats()
        self.wide_blocks_at_preemption: int | None = None

    def look(self, now_s: float, stats: scheduler_pb2.CellStats) -> None:
        """Take a cell's figures in."""
        del now_s
        if stats.num_preemptions_total and self.wide_blocks_at_preemption is None:
            *wider, _ = self.stats.lanes[0].num_referenced_blocks
            self.wide_blocks_at_preemption = sum(wider) - 2 * self.stats.num_running_seqs
        self.stats = stats


async def run_side(settings: CompareSettings, flags: dict[str, str], seed: int) -> tuple[list[Timing], LastFigures]:
    """Send the load to a cell of its own."""
    num_blocks = HELD * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE)
    memory_bytes = num_blocks * BLOCK_BYTES[settings.dtype]
    figures = LastFigures()
    with Cell(model=settings.model, dtype=settings.dtype, kv_cache_memory=memory_bytes, **flags) as cell:
        server = Server(cell.url, await find_model(cell.url))
        with Watch(cell, figures.look):
            timings = await run_closed_loop(server, WORKLOAD.jobs(1, content_seed=seed), SENT)
        figures.stats = cell.stats()
    return timings, figures


def latency_p99_s(timings: list[Timing]) -> float:
    """Return the time from request to last token that 99 % stay below."""
    return percentile([timing.chunk_times_s[-1] - timing.begin_s for timing in timings], 0.99)


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run both sides in turn."""
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    latencies: dict[str, list[float]] = {name: [] for name in SIDES}
    preemptions: list[float] = []
    for seed in range(repeats):
        for name, flags in SIDES.items():
            timings, figures = await run_side(settings, flags, seed)
            assert all(timing.num_output_tokens == OUTPUT_TOKENS for timing in timings)
            load, stats = LoadFigures.of(timings), figures.stats
            rates[name].append(load.output_tokens_per_s)
            latencies[name].append(latency_p99_s(timings))
            say(
                f"{name}: {load.output_tokens_per_s:.1f} tokens/s, latency p99 {latencies[name][-1]:.1f} s, time to "
                f"first token p99 {load.ttft_p99_ms / 1e3:.1f} s; {stats.num_preemptions_total} preemptions, "
                f"{stats.num_pressed_blocks_total} blocks narrowed, {stats.num_moved_blocks_total} moved"
            )
            if name == "ladder":
                preemptions.append(stats.num_preemptions_total)
                if figures.wide_blocks_at_preemption is not None:
                    say(f"blocks above the floor before the first preemption: {figures.wide_blocks_at_preemption}")
    pairs = list(zip(rates["ladder"], rates["preemption"], strict=True))
    late_pairs = list(zip(latencies["ladder"], latencies["preemption"], strict=True))
    return [
        never("preemptions with the ladder", preemptions, "preemptions"),
        at_least("tokens/s, ladder / preemption", [ladder / other for ladder, other in pairs], 1.0),
        at_most("latency p99, ladder / preemption", [ladder / other for ladder, other in late_pairs], 1.0),
    ]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
