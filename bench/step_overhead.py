"""A decode step through the services against the bare forward pass: 8 rows, contexts around 512 tokens.

Through the services: the time between two tokens of the clients' streams while all 8 decode. Bare: the same decoder and
kernels in this process, with the same threads and wait policy. One side rests while the other runs.

With a core left to the services, where their work can hide behind the worker's; and with all cores computing, as is the
default, where whatever the gateway, the scheduler and the clients do takes a core from the worker.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

from bench.cell import Cell
from bench.client import Server, Timing, find_model, run_closed_loop
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, say, spread
from bench.workload import Lengths, Workload

ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 448, 128
WORKLOAD = Workload(
    ROWS, Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS), vocab_size=49000
)
LIMIT = 1.15


def served_step_ms(timings: Sequence[Timing]) -> float:
    """Return the mean milliseconds between two tokens while all rows decode."""
    begin_s = max(timing.chunk_times_s[0] for timing in timings)
    end_s = min(timing.chunk_times_s[-1] for timing in timings)
    steps = []
    for timing in timings:
        times_s = [time_s for time_s in timing.chunk_times_s if begin_s <= time_s <= end_s]
        steps.append((times_s[-1] - times_s[0]) / (len(times_s) - 1))
    return 1e3 * mean(steps)


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Run both sides in turn, with each number of threads."""
    from worker_svc.threads import prepare_environment, set_num_threads, usable_cores

    prepare_environment(None)
    from bench.bare import BareDecode  # loads torch, for which the environment had to be ready

    # One thread loads and steps, as in the worker: a second one that computes changes how OpenMP's threads wait.
    with ThreadPoolExecutor(1) as computing:
        bare = computing.submit(BareDecode, settings.model, settings.dtype, ROWS).result()
        findings = []
        for num_threads in sorted({max(1, usable_cores() - 1), usable_cores()}):
            computing.submit(set_num_threads, num_threads).result()
            served_ms, bare_ms = [], []
            with Cell(model=settings.model, dtype=settings.dtype, num_threads=num_threads) as cell:
                server = Server(cell.url, await find_model(cell.url))
                for repeat in range(repeats):
                    timings = await run_closed_loop(server, WORKLOAD.jobs(0, content_seed=repeat), ROWS)
                    served_ms.append(served_step_ms(timings))
                    bare_ms.append(computing.submit(bare.step_ms, PROMPT_TOKENS, OUTPUT_TOKENS).result())
            name = f"{num_threads} of {usable_cores()} cores computing"
            say(f"decode step of {ROWS} rows, {name}: served {spread(served_ms)} ms, bare {spread(bare_ms)} ms")
            ratios = [served / alone for served, alone in zip(served_ms, bare_ms, strict=True)]
            findings.append(at_most(f"decode step through the services / bare forward pass, {name}", ratios, LIMIT))
    return findings


if __name__ == "__main__":
    run_comparison(measure, default_repeats=5)
