"""The prefix index that cells share, in Redis: which instances of all cells hold which blocks.

    core ──publish, withdraw, drop──▶ RedisIndex ──at once──▶ MemoryIndex ◀── longest_prefix ── core
                                          └── marks ──▶ PendingWrites ──batches, behind──▶ Redis ◀── lookup ── a request
                                                                                                        that waits

The core stays pure and synchronous: all that it asks is answered by the in-process index, which knows this cell's own
blocks exactly. Redis adds what only it can know, the blocks of *other* cells, and tells them of these. It is asked by
the shell while a request waits, beside the step loop, and what it answers is a hint: no step, no submit and no
admission ever waits for it. As long as one cell is alone there is nothing to be learned from it, and nothing is asked.

In Redis (DESIGN calls a worker process an instance; its lane has the same id):

    quire:1:block:<hash>      hash: instance -> "format:recipe"   TTL block_ttl_ms, renewed while held
    quire:1:live:<instance>   JSON: its cell and load             TTL live_ttl_ms, renewed by each beat
    quire:1:instances         set: who may be live                cleaned by whoever finds one dead
    quire:1:marker            a random number                     gone or changed: Redis lost its memory

- A liveness key for each instance, not fields of one key: fields have no TTL of their own before Redis 7.4.
- The marker is one for all cells. A cell that finds it missing sets another number, and every cell that finds another
  number than it knows publishes everything again: so all do after a flush, not only the first to notice.
- Renewal and publishing again are the same sweep over what the in-process index holds; writing is idempotent, so a
  sweep also repairs what a failover or an eviction lost.
- Readers ignore instances that are not live. Fields of the dead, and false ones of this cell's own instances, are
  deleted by the cell that came across them, after the next beat has confirmed it.

When Redis is away, full, read-only or refuses the login, the cell goes on as if none were configured: writes wait as
marks, look-ups are not sent, and attempts are made at growing intervals. On its return everything is published again.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, LaneId
from scheduler_svc.index.breaker import Breaker
from scheduler_svc.index.memory import MemoryIndex
from scheduler_svc.index.pending import PendingWrites, Write
from scheduler_svc.index.redis_blocks import KEY_PREFIX, BlockKeys, block_keys, prefix_lengths
from scheduler_svc.index.redis_client import TRANSPORT_ERRORS, Command, RedisConnection
from scheduler_svc.index.redis_url import RedisAddress
from scheduler_svc.timing import Clock, IndexTiming

logger = logging.getLogger(__name__)

_INSTANCES = KEY_PREFIX + b"instances"
_MARKER = KEY_PREFIX + b"marker"
_MAX_MARKS = 131_072  # about 200 bytes each
_MAX_QUEUED_LOOKUPS = 64
_MAX_LOOKUP_BLOCKS = 128  # a longer prefix would choose the same cell
_MAX_SUSPECTS = 4096
_CANCEL_AGAIN_S = 0.05


def _live_key(lane_id: LaneId) -> bytes:
    return KEY_PREFIX + b"live:" + lane_id.encode()


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """What a live instance says of itself."""

    cell_name: str
    load: int  # sequences that run on it


@dataclass(slots=True)
class IndexCounters:
    """Totals since the scheduler's start."""

    writes: int = 0  # blocks of which Redis was told
    republishes: int = 0  # times that everything was published again: after an outage, or a flush
    outages: int = 0
    lookups: int = 0  # that were sent
    failed_lookups: int = 0  # of these, without an answer in time
    lookup_ms: float = 0.0  # of all look-ups together
    longer_elsewhere: int = 0  # look-ups by which another cell holds more of the prefix than this one
    stale_hints: int = 0  # fields of instances that were dead, or did not hold the block


class RedisIndex:
    """A PrefixIndex for the core, kept in step with Redis behind its back.

    `loads` tells this cell's instances of the moment and the sequences that run on each. `on_missing` gets, once, the
    instances of this cell that a scheduler before this one said to live, and that have not registered here. Call
    `start` inside the event loop that everything else runs on, and `stop` at the end. None of the methods raises for
    what is wrong with Redis.
    """

    def __init__(
        self,
        address: RedisAddress,
        loads: Callable[[], Mapping[LaneId, int]],
        clock: Clock,
        timing: IndexTiming,
        on_missing: Callable[[set[LaneId]], None] = lambda _: None,
    ) -> None:
        self.counters = IndexCounters()
        self.live: Mapping[LaneId, LiveInstance] = {}  # of all cells, as of the last beat
        self.is_up = False
        self._address = address
        self._loads = loads
        self._on_missing = on_missing
        self._clock = clock
        self._timing = timing
        self._cell_name = ""
        self._local = MemoryIndex()
        self._pending = PendingWrites(self._local, _MAX_MARKS)
        self._num_unconfirmed_writes = 0
        self._is_beat_due = True
        self._has_news = asyncio.Event()
        self._writer_breaker = Breaker(timing.min_backoff_ms, timing.max_backoff_ms)
        self._lookup_breaker = Breaker(timing.min_backoff_ms, timing.max_backoff_ms)
        self._trouble: str | None = None  # what the log was told last
        self._marker: bytes | None = None
        self._announced: frozenset[LaneId] = frozenset()
        self._others: set[LaneId] = set()  # live instances of other cells
        self._last_sweep_ms = self._last_beat_ms = clock()
        self._suspects: dict[tuple[LaneId, BlockHash], None] = {}
        self._queued_lookups: deque[Sequence[BlockHash]] = deque()
        self._has_lookups = asyncio.Event()
        self._connection: RedisConnection | None = None
        self._blocks: BlockKeys | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # ---- its life

    def start(self, cell_name: str) -> None:
        """Begin to write, and to look up. A scheduler that follows in this one's place has the same `cell_name`."""
        self._cell_name = cell_name
        self._connection = RedisConnection(self._address, self._timing.answer_ms)
        self._blocks = block_keys(self._connection, self._timing.block_ttl_ms)
        self._tasks = [asyncio.create_task(self._keep_written()), asyncio.create_task(self._serve_lookups())]

    async def stop(self) -> None:
        """End at once. The instances stay live for live_ttl_ms: a scheduler that is started again finds them."""
        # More than once where need be: a cancellation that meets a timeout of redis-py's own, of 0 s, passes for that.
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)
        if self._connection is not None:
            with contextlib.suppress(RedisError, *TRANSPORT_ERRORS):
                await self._connection.close()

    @property
    def num_pending_writes(self) -> int:
        """Blocks of which Redis is still to be told, or told again, or has not confirmed that it was."""
        return len(self._pending) + self._num_unconfirmed_writes

    # ---- what the core calls: PrefixIndex

    def publish(self, lane_id: LaneId, blocks: Mapping[BlockHash, Encoding]) -> None:
        """Record that the lane holds these blocks, and how; saying so twice changes nothing."""
        self._local.publish(lane_id, blocks)
        self._mark(lane_id, blocks)

    def withdraw(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks no more; unknown ones are ignored."""
        self._local.withdraw(lane_id, block_hashes)
        self._mark(lane_id, block_hashes)

    def drop_lane(self, lane_id: LaneId) -> None:
        """Forget all that was said of the lane."""
        block_hashes = self._local.hashes_of(lane_id)
        self._local.drop_lane(lane_id)
        self._is_beat_due = True
        self._mark(lane_id, block_hashes)

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        """Return how many of the hashes each lane of this cell holds from the first on. Never asks Redis."""
        return self._local.longest_prefix(block_hashes)

    # ---- look-ups

    def look_elsewhere(self, hash_blocks: Callable[[], Sequence[BlockHash]]) -> None:
        """Have it counted, in a moment, whether another cell holds more of a waiting request's prefix.

        Costs nothing, and is not done, while no other cell lives or Redis is away or slow: then the prefix is not even
        hashed.
        """
        if not self._others or not self._may_look_up() or len(self._queued_lookups) >= _MAX_QUEUED_LOOKUPS:
            return
        if block_hashes := hash_blocks():
            self._queued_lookups.append(block_hashes[:_MAX_LOOKUP_BLOCKS])
            self._has_lookups.set()

    async def lookup(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int] | None:
        """Return how many of the hashes each live instance of any cell holds from the first on, in one round trip.

        None when Redis is away or does not answer within lookup_ms.
        """
        if not block_hashes:
            return {}
        if not self._may_look_up():
            return None
        assert self._blocks is not None
        self.counters.lookups += 1
        began_ns = time.perf_counter_ns()
        try:
            async with asyncio.timeout(self._timing.lookup_ms / 1000):
                instances = await self._blocks.read(block_hashes)
            lengths = prefix_lengths([self._holders(*held) for held in zip(block_hashes, instances, strict=False)])
        except (RedisError, *TRANSPORT_ERRORS) as error:  # OSError includes asyncio's TimeoutError
            self.counters.failed_lookups += 1
            self._lookup_breaker.fail(self._clock())
            logger.debug("a look-up in the shared prefix index failed: %s", _text(error))
            return None
        finally:
            self.counters.lookup_ms += (time.perf_counter_ns() - began_ns) / 1e6
        self._lookup_breaker.succeed()
        return lengths

    def _may_look_up(self) -> bool:
        return self.is_up and not self._lookup_breaker.remaining_ms(self._clock())

    def _holders(self, block_hash: BlockHash, instances: Sequence[bytes]) -> set[LaneId]:
        """Return the instances that live and hold the block; suspects the others of being gone."""
        holders = set()
        for instance in instances:
            lane_id = LaneId(instance.decode())
            is_own = lane_id in self._announced
            if self._local.held_by(lane_id, block_hash) if is_own else lane_id in self.live:
                holders.add(lane_id)
                continue
            self.counters.stale_hints += 1
            if len(self._suspects) < _MAX_SUSPECTS:
                self._suspects[lane_id, block_hash] = None
        return holders

    async def _serve_lookups(self) -> None:
        """Look up what waits, one after the other: two at once would only hold the loop for longer."""
        while True:
            await self._has_lookups.wait()
            while self._queued_lookups:
                try:
                    await self._count_longer_elsewhere(self._queued_lookups.popleft())
                except Exception as error:
                    # What nobody should have written, or a mistake in here: it costs hints, and the next is looked up.
                    self.counters.failed_lookups += 1
                    self._lookup_breaker.fail(self._clock())
                    logger.warning("a look-up in the shared prefix index went wrong", exc_info=error)
            self._has_lookups.clear()

    async def _count_longer_elsewhere(self, block_hashes: Sequence[BlockHash]) -> None:
        lengths = await self.lookup(block_hashes)
        if lengths is None:
            self._queued_lookups.clear()
            return
        here = max(self._local.longest_prefix(block_hashes).values(), default=0)
        elsewhere = max((lengths.get(lane_id, 0) for lane_id in self._others), default=0)
        self.counters.longer_elsewhere += elsewhere > here

    # ---- writing behind

    def _mark(self, lane_id: LaneId, block_hashes: Iterable[BlockHash]) -> None:
        if lane_id not in self._announced:
            self._is_beat_due = True  # readers must know an instance before they see its blocks
        self._pending.mark(lane_id, block_hashes)
        self._has_news.set()

    async def _keep_written(self) -> None:
        """Keep Redis told, for ever; attempts at growing intervals while it is away."""
        while True:
            try:
                await self._beat()
                self._come_up()
                await self._write_behind()
            except Exception as error:
                # Not only what Redis does wrong: even a mistake in here must cost hints and no request.
                self._go_down(error)
            await asyncio.sleep(self._writer_breaker.remaining_ms(self._clock()) / 1000)

    async def _write_behind(self) -> None:
        """Write changes as they come and beats as they are due. Returns never; raises when Redis fails."""
        assert self._blocks is not None
        while True:
            now_ms = self._clock()
            if self._is_beat_due or now_ms - self._last_beat_ms >= self._timing.beat_ms:
                await self._beat()
                if self._is_beat_due:
                    continue  # an instance came during this one, and its blocks must not be written before it is live
            if now_ms - self._last_sweep_ms >= self._timing.renew_ms:
                self._begin_sweep()
            is_sweeping = not self._pending.has_marks
            writes = self._pending.take(self._blocks.max_writes)
            if writes:
                await self._write(writes)
                # Steps come first: the loop is theirs for most of the time. A sweep is in no hurry at all.
                pause_ms = self._timing.sweep_pause_ms if is_sweeping else self._timing.write_pause_ms
                await asyncio.sleep(pause_ms / 1000)
                continue
            self._has_news.clear()
            wait_ms = self._last_beat_ms + self._timing.beat_ms - self._clock()
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(max(0, wait_ms) / 1000):
                    await self._has_news.wait()

    async def _write(self, writes: Sequence[Write]) -> None:
        assert self._blocks is not None
        self._num_unconfirmed_writes = len(writes)
        try:
            await self._blocks.write(writes)
        except BaseException:
            self._pending.mark_again(writes)
            raise
        finally:
            self._num_unconfirmed_writes = 0
        self.counters.writes += len(writes)

    async def _beat(self) -> None:
        """Say that this cell's instances live, learn who else does, and notice when Redis has lost its memory."""
        self._is_beat_due = False
        began_ms, suspects = self._clock(), self._suspects
        self._suspects = {}
        loads = self._loads()
        gone = self._announced - loads.keys()
        commands: list[Command] = [("SET", _MARKER, secrets.token_bytes(8), "NX"), ("GET", _MARKER)]
        for lane_id, load in loads.items():
            said = json.dumps({"cell": self._cell_name, "load": load})
            commands.append(("SET", _live_key(lane_id), said, "PX", self._timing.live_ttl_ms))
            commands.append(("SADD", _INSTANCES, lane_id))
        for lane_id in gone:
            commands += (("DEL", _live_key(lane_id)), ("SREM", _INSTANCES, lane_id))
        answers = await self._pipelined([*commands, ("SMEMBERS", _INSTANCES)])
        self._announced = frozenset(loads)
        self.live = await self._read_live([LaneId(member.decode()) for member in answers[-1]])
        self._others = {lane_id for lane_id, other in self.live.items() if other.cell_name != self._cell_name}
        self._notice_memory_loss(answers[1], began_ms)
        for lane_id, block_hash in suspects:
            if lane_id not in self.live or lane_id in self._announced:
                self._pending.mark(lane_id, (block_hash,))
        self._last_beat_ms = began_ms

    async def _read_live(self, lane_ids: Sequence[LaneId]) -> dict[LaneId, LiveInstance]:
        """Return who of those that may be live is, and take the others out of the set."""
        if not lane_ids:
            return {}
        said_by_lane = dict(
            zip(lane_ids, await self._pipelined([("GET", _live_key(i)) for i in lane_ids]), strict=True)
        )
        dead = [lane_id for lane_id, said in said_by_lane.items() if said is None]
        if dead:
            await self._pipelined([("SREM", _INSTANCES, *dead)])
        live = {lane_id: _live_instance(said) for lane_id, said in said_by_lane.items() if said is not None}
        return {lane_id: instance for lane_id, instance in live.items() if instance is not None}

    def _notice_memory_loss(self, marker: bytes, now_ms: int) -> None:
        was_taken_for_dead = now_ms - self._last_beat_ms > self._timing.live_ttl_ms
        if self.is_up and (marker != self._marker or was_taken_for_dead):
            logger.warning("the shared prefix index has lost what it knew of this cell: publishing all of it again")
            self.counters.republishes += 1
            self._begin_sweep()
        self._marker = marker

    def _come_up(self) -> None:
        """Publish everything: nobody knows what Redis has kept."""
        if self._trouble is not None:
            self.counters.republishes += 1
            logger.warning("the shared prefix index at %s is back: publishing everything again", self._address)
        else:
            logger.info("the shared prefix index is at %s, this cell is %s", self._address, self._cell_name)
            self._on_missing(self.live.keys() - self._others - self._announced)
        self._trouble = None
        self.is_up = True
        self._writer_breaker.succeed()
        self._lookup_breaker.succeed()
        self._begin_sweep()

    def _go_down(self, error: Exception) -> None:
        """Go on without Redis; the log is told once of each kind of trouble."""
        self.counters.outages += self.is_up or self._trouble is None
        self.is_up = False
        self.live, self._others = {}, set()
        self._queued_lookups.clear()
        self._writer_breaker.fail(self._clock())
        trouble = _trouble(error)
        if trouble == self._trouble:
            return
        self._trouble = trouble
        is_known = isinstance(error, (RedisError, *TRANSPORT_ERRORS))
        logger.warning(
            "the shared prefix index at %s %s: this cell goes on with its own (%s)",
            self._address,
            trouble,
            _text(error),
            exc_info=None if is_known else error,
        )

    def _begin_sweep(self) -> None:
        self._last_sweep_ms = self._clock()
        self._pending.sweep()

    async def _pipelined(self, commands: Sequence[Command]) -> list[Any]:
        assert self._connection is not None
        return await self._connection.pipelined(commands)


def _live_instance(said: bytes) -> LiveInstance | None:
    """Return what an instance said of itself; None when this version does not understand it."""
    try:
        fields = json.loads(said)
        return LiveInstance(str(fields["cell"]), int(fields["load"]))
    except (ValueError, TypeError, KeyError):
        return None


def _trouble(error: Exception) -> str:
    """Return what is wrong with Redis, in the same words for errors that have one cause."""
    if isinstance(error, (AuthenticationError, NoPermissionError)):
        return "refuses the login"
    if isinstance(error, OutOfMemoryError):
        return "is full"
    if isinstance(error, ReadOnlyError):
        return "is a read-only replica"
    if isinstance(error, TimeoutError):
        return "does not answer in time"
    if isinstance(error, (ConnectionError, *TRANSPORT_ERRORS)):
        return "cannot be reached"
    return "does not do what it is asked" if isinstance(error, RedisError) else "is used wrongly"


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
