"""Puts the scheduler together and runs it: the gRPC server, the timers, and an orderly end."""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import grpc.aio

from protos import scheduler_pb2
from protos.channel import SERVER_OPTIONS, ErrorInterceptor, Refusals, TokenInterceptor
from protos.credentials import Credentials
from protos.scheduler_pb2_grpc import add_SchedulerServicer_to_server
from scheduler_svc.cell import Cell
from scheduler_svc.core.types import ErrorCode, SchedulerError
from scheduler_svc.errors import ShuttingDownError
from scheduler_svc.index.memory import MemoryIndex
from scheduler_svc.index.redis_url import parse_redis_url
from scheduler_svc.ownership import Ownership
from scheduler_svc.registry import Registry
from scheduler_svc.service import SchedulerService
from scheduler_svc.session import SessionHub
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.stats import cell_stats
from scheduler_svc.timing import Clock, IndexTiming, Timing, monotonic_ms

if TYPE_CHECKING:
    from scheduler_svc.index.redis import RedisIndex

logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 0.5


class CannotListenError(Exception):
    """The scheduler cannot listen at its address."""


class SchedulerServer:
    """One scheduler. Create it inside a running event loop; then `start`, at last `drain` (where wanted) and `stop`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        timing: Timing | None = None,
        clock: Clock = monotonic_ms,
        index_timing: IndexTiming | None = None,
    ) -> None:
        self._settings = settings
        self._credentials = Credentials.of_server(settings, settings.host)
        self._timing = timing or Timing()
        self._clock = clock
        self._started_ms = clock()
        ownership = Ownership()
        self.shared_index = self._make_shared_index(index_timing or IndexTiming())
        self.cell = Cell(
            settings,
            self.shared_index or MemoryIndex(),
            clock,
            ownership.route,
            look_elsewhere=self.shared_index.look_elsewhere
            if self.shared_index and settings.enable_prefix_caching
            else None,
        )
        self.hub = SessionHub(self.cell, ownership, self._timing, clock)
        self.refusals = refusals = Refusals()
        self.registry = Registry(
            self.cell, self._timing, clock, self._credentials, refusals, on_model=self.hub.submit_held
        )
        self._service = SchedulerService(self.cell, self.hub, self.registry, self.figures, self._timing, clock)
        self._server = grpc.aio.server(
            interceptors=[TokenInterceptor(settings.cluster_token, refusals), ErrorInterceptor(refusals)],
            options=SERVER_OPTIONS,
        )
        self._ticker: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._no_workers_since_ms: int | None = None

    async def start(self) -> str:
        """Listen; returns HOST:PORT. Raises CannotListenError."""
        add_SchedulerServicer_to_server(self._service, self._server)
        host, port = self._settings.host, self._settings.scheduler_port
        shown_host = f"[{host}]" if ":" in host else host
        try:
            # Asked of the system first: gRPC tells no reason, and prints lines of its own.
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                pass
            port = self._credentials.add_port(self._server, f"{shown_host}:{port}")
        except (OSError, RuntimeError) as error:
            # Of "Address already in use (while attempting to bind ...)" the address is said already.
            reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (while")[0]
            raise CannotListenError(f"cannot listen on {shown_host}:{port}: {reason}") from error
        await self._server.start()
        if self.shared_index is not None:
            self.shared_index.start(self._settings.cell_name or f"{socket.gethostname()}:{port}")
        self._ticker = asyncio.create_task(self._tick())
        return f"{shown_host}:{port}"

    async def drain(self) -> None:
        """Refuse new requests and let running ones finish; what has not after the drain time ends with an error."""
        self.hub.is_draining = True
        logger.info("draining")
        try:
            await asyncio.wait_for(self._drained.wait(), self._settings.scheduler_drain_seconds)
        except TimeoutError:
            self.hub.end_requests(SchedulerError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
        try:
            # `stop` cancels the sessions' writers, and the ends lie in their outboxes.
            await asyncio.wait_for(self._drained.wait(), self._timing.last_ends_ms / 1000)
        except TimeoutError:
            logger.warning("not all gateways have taken the ends of their requests")

    async def stop(self) -> None:
        """End sessions, watches and lanes, and stop listening."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self.hub.end_all(ShuttingDownError("the scheduler stops"))
        self._service.stop_watches()
        await self._server.stop(_STOP_GRACE_SECONDS)
        await self.registry.close()
        if self.shared_index is not None:
            await self.shared_index.stop()

    def figures(self) -> scheduler_pb2.CellStats:
        """Return the cell's figures of the moment."""
        return cell_stats(
            self.cell,
            self.registry.lanes,
            num_held_seqs=self.hub.num_held_seqs,
            uptime_ms=self._clock() - self._started_ms,
            is_draining=self.hub.is_draining,
            shared_index=self.shared_index,
            refusals=self.refusals,
        )

    def _make_shared_index(self, timing: IndexTiming) -> "RedisIndex | None":
        if not self._settings.redis_url:
            return None
        from scheduler_svc.index.redis import RedisIndex  # its client takes half a second to load

        return RedisIndex(
            parse_redis_url(self._settings.redis_url),
            lambda: self.cell.loads(),  # the cell is made after its index
            self._clock,
            timing,
            on_missing=lambda lane_ids: self.cell.await_lanes(lane_ids, self._started_ms + self._timing.rejoin_ms),
        )

    async def _tick(self) -> None:
        """Look at all timers again and again. After a stall of this loop they start anew before anybody is judged."""
        due_ms = self._clock()
        try:
            while True:
                now_ms = self._clock()
                if now_ms - due_ms > self._timing.stall_ms:
                    logger.warning("this process stalled for %d ms: its timers start anew", now_ms - due_ms)
                    self.hub.restart_timers()
                    self.registry.restart_timers()
                    self._no_workers_since_ms = None
                due_ms = now_ms + self._timing.tick_ms
                self._look()
                await asyncio.sleep(self._timing.tick_ms / 1000)
        except Exception as error:
            self.cell.fail(error)

    def _look(self) -> None:
        self.hub.judge()
        self.registry.judge()
        self.cell.expire()
        if self.hub.is_draining:
            if self._has_lost_all_workers():
                self.hub.end_requests(SchedulerError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
            if self.hub.is_idle:
                self._drained.set()

    def _has_lost_all_workers(self) -> bool:
        """Return whether there has been no worker for so long that none of those there were will come back."""
        if self.registry.lanes:
            self._no_workers_since_ms = None
            return False
        if self._no_workers_since_ms is None:
            self._no_workers_since_ms = self._clock()
        return self._clock() - self._no_workers_since_ms >= self._timing.silence_ms
