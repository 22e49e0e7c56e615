"""Clients that leave: 200 streams opened at once, half of them cut after their first token.

Within 2 s of the last stream's end nothing runs or waits, every block is free or cached again, no log has a warning.
"""

import asyncio
import time
from contextlib import aclosing

import aiohttp

from bench.cell import Cell
from bench.client import Server, events, find_model
from bench.compare import CompareSettings, run_comparison
from bench.report import Finding, at_most, never, say
from bench.workload import Job, Lengths, Workload
from protos.scheduler_pb2 import CellStats

WORKLOAD = Workload(200, Lengths(16, 64), Lengths(32, 64), vocab_size=49000)
LIMIT_S = 2.0
GIVE_UP_S = 20.0
POLL_S = 0.02


async def read_or_leave(client: aiohttp.ClientSession, server: Server, job: Job, leaves: bool) -> None:
    """Open a stream and read it to its end, or close the connection after the first token."""
    async with aclosing(events(client, server, job)) as stream:
        async for _ in stream:
            if leaves:
                return


def reusable_blocks(stats: CellStats) -> int:
    """Return the blocks that nobody references: free ones, and cached ones that make room when room is needed."""
    return sum(lane.num_free_blocks + lane.num_cached_blocks for lane in stats.lanes)


def is_idle(stats: CellStats) -> bool:
    """Return whether no sequence runs or waits, and no step is under way."""
    steps = sum(lane.num_steps_in_flight + lane.num_quarantined_blocks for lane in stats.lanes)
    return not (stats.num_running_seqs or stats.num_waiting_seqs or steps)


async def seconds_until_idle(cell: Cell) -> float:
    """Return how long the cell still has something to do; GIVE_UP_S when it does not end."""
    begin_s = time.monotonic()
    while True:
        has_ended = is_idle(cell.stats())
        waited_s = time.monotonic() - begin_s  # after the answer: the time that asking takes counts too
        if has_ended or waited_s > GIVE_UP_S:
            return waited_s
        await asyncio.sleep(POLL_S)


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Open the streams and cut every second one."""
    idle_s, lost_blocks = [], []
    with Cell(model=settings.model, dtype=settings.dtype) as cell:
        server = Server(cell.url, await find_model(cell.url))
        at_start = reusable_blocks(cell.stats())
        for repeat in range(repeats):
            jobs = WORKLOAD.jobs(lengths_seed=repeat)
            async with server.client() as client, asyncio.TaskGroup() as group:
                for position, job in enumerate(jobs):
                    group.create_task(read_or_leave(client, server, job, leaves=position % 2 == 1))
            idle_s.append(await seconds_until_idle(cell))
            lost_blocks.append(float(at_start - reusable_blocks(cell.stats())))
            say(f"repeat {repeat + 1}: idle after {idle_s[-1]:.2f} s, {lost_blocks[-1]:g} of {at_start} blocks lost")
        severe = cell.severe_lines()
        for line in severe:
            say(line)
    return [
        at_most("seconds from the last stream's end to an idle cell", idle_s, LIMIT_S, "s"),
        never("blocks that did not come back", lost_blocks, "blocks"),
        never("warnings and errors in the logs", [float(len(severe))], "lines"),
    ]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=3)
