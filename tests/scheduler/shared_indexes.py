"""Cells' shared indexes for tests: made, started and stopped."""

import asyncio
import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, Format, LaneId
from scheduler_svc.index.redis import RedisIndex
from scheduler_svc.index.redis_url import parse_redis_url
from scheduler_svc.timing import IndexTiming, monotonic_ms

from .conftest import until

A, B, C = LaneId("a"), LaneId("b"), LaneId("c")

# Beats and attempts come often, and nothing that is there is missed because the machine is busy.
TIMING = IndexTiming(beat_ms=20, lookup_ms=5000, answer_ms=5000, sweep_pause_ms=1, min_backoff_ms=10, max_backoff_ms=40)
# Longer than any test waits: whatever waits for an answer fails it.
PATIENT = replace(TIMING, lookup_ms=120_000, answer_ms=120_000)


def chain(name: str, num_blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{idx}-{name}".encode().ljust(32)) for idx in range(num_blocks)]


NATIVE = Encoding(Format.NATIVE, 0)


def native(block_hashes: Iterable[BlockHash]) -> dict[BlockHash, Encoding]:
    """Return what is published of native blocks."""
    return dict.fromkeys(block_hashes, NATIVE)


class SharedIndexes:
    """The indexes of several cells."""

    def __init__(self) -> None:
        self._indexes: list[RedisIndex] = []

    def start(
        self,
        url: str,
        cell_name: str = "cell-1",
        loads: dict[LaneId, int] | None = None,
        timing: IndexTiming = TIMING,
        before_beat: Callable[[], None] = lambda: None,
        on_beat: Callable[[dict[LaneId, int]], None] = lambda _: None,
    ) -> RedisIndex:
        """Start a cell's index; its instances are those of `loads`, which may change later, as by `on_beat`.

        That is called in each beat, once it has taken the loads and waits for Redis; `before_beat` before it asks.
        """
        cell_loads = {A: 0} if loads is None else loads

        def take_loads() -> dict[LaneId, int]:
            before_beat()
            asyncio.get_running_loop().call_soon(on_beat, cell_loads)
            return dict(cell_loads)

        index = RedisIndex(parse_redis_url(url), take_loads, monotonic_ms, timing)
        index.start(cell_name)
        self._indexes.append(index)
        return index

    async def stop(self) -> None:
        for index in self._indexes:
            await index.stop()
        collect_connections()


def collect_connections() -> None:
    """Have collected, here and not in some later test, what redis-py drops when it is cancelled while it connects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def settled(index: RedisIndex) -> None:
    """Return when Redis has been told everything that the index knows."""
    await until(lambda: index.is_up and not index.num_pending_writes)


async def seen_by(reader: RedisIndex, hashes: Sequence[BlockHash], live: Sequence[LaneId]) -> dict[LaneId, int]:
    """Return what a reader finds once it knows that these instances live."""
    await until(lambda: set(live) <= set(reader.live))
    found = await reader.lookup(hashes)
    assert found is not None
    return found
