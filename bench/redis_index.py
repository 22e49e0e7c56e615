"""The shared prefix index in Redis: what a look-up of 128 blocks takes, and what a cached block costs.

The index is the scheduler's own, on an event loop of its own, against a server on loopback. Reported are a look-up's
time (p50, p99) and the time that it holds the event loop, in which no step can be planned; keys and bytes a cached
block; blocks a second when everything is published again, and the event loop's share that this takes.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median

from bench.compare import CompareSettings, run_comparison
from bench.redis_server import RedisServer
from bench.report import Finding, at_most, percentile, say, spread
from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, Format, LaneId
from scheduler_svc.index.redis import RedisIndex
from scheduler_svc.index.redis_url import parse_redis_url
from scheduler_svc.timing import IndexTiming, monotonic_ms

INSTANCE = LaneId("a-host-name-1234-0f3b9a77")  # as long as a worker's
OTHER = LaneId("a-host-name-5678-1c2d3e4f")
NATIVE = Encoding(Format.NATIVE, 0)
PREFIX_BLOCKS, LOOKUPS = 128, 500
STORED_BLOCKS = 50_000
POLL_S = 0.001


def random_hashes(count: int) -> list[BlockHash]:
    return [BlockHash(os.urandom(32)) for _ in range(count)]


async def settle(index: RedisIndex) -> None:
    """Return when Redis has been told everything."""
    while not index.is_up or index.num_pending_writes:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(POLL_S)


async def lookup_times_ms(index: RedisIndex, prefixes: Sequence[Sequence[BlockHash]]) -> tuple[list[float], float]:
    """Look prefixes up one after the other; return each one's time, and the CPU time of this process for one."""
    times_ms = []
    cpu_s = time.process_time()
    for number in range(LOOKUPS):
        begin_ns = time.perf_counter_ns()
        lengths = await index.lookup(prefixes[number % len(prefixes)])
        times_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
        assert lengths == {INSTANCE: PREFIX_BLOCKS}, lengths
    return times_ms, 1e3 * (time.process_time() - cpu_s) / LOOKUPS


def used_bytes(server: RedisServer) -> int:
    """Return what the server's data takes, its hash tables included."""
    return int(server.ask("INFO", "memory")["used_memory"])


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Fill the index, look up, publish everything again."""
    del settings
    p50_ms: list[float] = []
    p99_ms: list[float] = []
    cpu_ms: list[float] = []
    written_per_s: list[float] = []
    block_bytes: list[float] = []
    with RedisServer() as server:
        timing = IndexTiming(lookup_ms=1000)
        index = RedisIndex(parse_redis_url(server.url), lambda: {INSTANCE: 0, OTHER: 0}, monotonic_ms, timing)
        index.start("bench")
        try:
            await settle(index)
            for _ in range(repeats):
                empty_bytes = used_bytes(server)
                hashes = random_hashes(STORED_BLOCKS)
                begin_s, cpu_s = time.perf_counter(), time.process_time()
                index.publish(INSTANCE, dict.fromkeys(hashes, NATIVE))
                await settle(index)
                took_s = time.perf_counter() - begin_s
                written_per_s.append(STORED_BLOCKS / took_s)
                say(f"the event loop was busy with it for {(time.process_time() - cpu_s) / took_s:.0%} of the time")
                block_bytes.append((used_bytes(server) - empty_bytes) / STORED_BLOCKS)
                prefixes = [
                    hashes[first : first + PREFIX_BLOCKS] for first in range(0, 32 * PREFIX_BLOCKS, PREFIX_BLOCKS)
                ]
                times_ms, one_cpu_ms = await lookup_times_ms(index, prefixes)
                p50_ms.append(percentile(times_ms, 0.5))
                p99_ms.append(percentile(times_ms, 0.99))
                cpu_ms.append(one_cpu_ms)
                num_keys = int(server.ask("DBSIZE"))
                index.publish(OTHER, dict.fromkeys(hashes, NATIVE))
                await settle(index)
                both_bytes = (used_bytes(server) - empty_bytes) / STORED_BLOCKS
                for lane_id in (INSTANCE, OTHER):
                    index.drop_lane(lane_id)
                    await settle(index)
        finally:
            await index.stop()
    say(f"look-up of {PREFIX_BLOCKS} blocks: p50 {spread(p50_ms)} ms, p99 {spread(p99_ms)} ms")
    say(f"of this the event loop is held for {spread(cpu_ms)} ms")
    say(f"publishing behind: {spread(written_per_s)} blocks a second")
    say(
        f"a cached block: 1 key ({num_keys} keys for {STORED_BLOCKS} blocks and the live set), "
        f"{median(block_bytes):.0f} bytes; held by a second instance too: {both_bytes:.0f} bytes"
    )
    return [
        at_most(f"look-up of {PREFIX_BLOCKS} blocks, p99", p99_ms, IndexTiming().lookup_ms, "ms"),
        at_most("bytes of Redis a cached block", block_bytes, 300, "bytes"),
    ]


if __name__ == "__main__":
    run_comparison(measure, default_repeats=3)
