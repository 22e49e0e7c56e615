"""The gRPC service: it translates calls into what the hub and the registry do, and moves a session's messages."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from protos import scheduler_pb2
from protos.scheduler_pb2_grpc import SchedulerServicer
from scheduler_svc.cell import Cell
from scheduler_svc.errors import ServiceError, SessionBrokenError, SessionRefusedError
from scheduler_svc.registry import Registry
from scheduler_svc.session import GatewaySession, SessionHub
from scheduler_svc.timing import Clock, Timing

_Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_WATCH_INTERVAL_MS = 1000


class SchedulerService(SchedulerServicer):
    """The methods of `quire.v1.Scheduler`. `figures` gives the cell's figures of the moment."""

    def __init__(
        self,
        cell: Cell,
        hub: SessionHub,
        registry: Registry,
        figures: Callable[[], scheduler_pb2.CellStats],
        timing: Timing,
        clock: Clock,
    ) -> None:
        self._cell = cell
        self._hub = hub
        self._registry = registry
        self._figures = figures
        self._timing = timing
        self._clock = clock
        self._is_stopping = asyncio.Event()

    def stop_watches(self) -> None:
        """End all Watch streams."""
        self._is_stopping.set()

    async def Session(self, request_iterator: Any, context: _Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one gateway until its stream breaks or is ended; raises ServiceError in the latter case.

        A coroutine that writes through the context, which grpc.aio takes as well as a generator: cancelled in the
        middle of a write it still gets to its `finally` at once.
        """
        ended: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()

        def end(error: ServiceError) -> None:
            if not ended.done():
                ended.set_result(error)

        session = self._hub.open(await self._hello(context), end)
        pumps = (asyncio.create_task(self._read(context, session)), asyncio.create_task(self._write(context, session)))
        try:
            await asyncio.wait((*pumps, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise ended.result()
            for pump in pumps:
                if pump.done():
                    pump.result()
        finally:
            self._hub.close(session)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def Register(  # noqa: N802
        self, request: scheduler_pb2.RegisterRequest, context: _Context
    ) -> scheduler_pb2.RegisterResponse:
        """Take a worker in, or refuse it with the reason."""
        await self._registry.register(request)
        return scheduler_pb2.RegisterResponse(heartbeat_interval_ms=self._timing.sign_of_life_ms)

    async def Heartbeat(  # noqa: N802
        self, request: scheduler_pb2.HeartbeatRequest, context: _Context
    ) -> scheduler_pb2.HeartbeatResponse:
        """Note that a worker lives."""
        return self._registry.heartbeat(request)

    async def GetModel(  # noqa: N802
        self, request: scheduler_pb2.GetModelRequest, context: _Context
    ) -> scheduler_pb2.GetModelResponse:
        """Return the cell's model and limits."""
        capacities = self._registry.kv_capacity_tokens
        return scheduler_pb2.GetModelResponse(
            model=self._cell.model,
            max_num_seqs=sum(lane.max_num_seqs for lane in self._registry.lanes),
            kv_capacity_tokens=max(capacities.values(), default=0),
            kv_capacity_tokens_by_floor={int(floor): num_tokens for floor, num_tokens in capacities.items()},
            max_queued_requests=self._cell.settings.max_queued_requests,
        )

    async def GetStats(  # noqa: N802
        self, request: scheduler_pb2.GetStatsRequest, context: _Context
    ) -> scheduler_pb2.CellStats:
        """Return the cell's figures."""
        return self._figures()

    async def Watch(  # noqa: N802
        self, request: scheduler_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[scheduler_pb2.CellStats]:
        """Send the cell's figures again and again."""
        interval_ms = request.interval_ms or _DEFAULT_WATCH_INTERVAL_MS
        while not self._is_stopping.is_set():
            yield self._figures()
            try:
                await asyncio.wait_for(self._is_stopping.wait(), interval_ms / 1000)
            except TimeoutError:
                continue

    async def _hello(self, context: _Context) -> scheduler_pb2.Hello:
        try:
            message = await asyncio.wait_for(context.read(), self._timing.silence_ms / 1000)
        except TimeoutError:
            raise SessionBrokenError("no Hello came") from None
        if not isinstance(message, scheduler_pb2.ClientMessage) or not message.HasField("hello"):
            raise SessionRefusedError("a session opens with Hello")
        return message.hello

    async def _read(self, context: _Context, session: GatewaySession) -> None:
        """Act on the gateway's messages until its half of the stream ends."""
        while (message := await context.read()) is not grpc.aio.EOF:
            self._hub.receive(session, message)

    async def _write(self, context: _Context, session: GatewaySession) -> None:
        """Send what the outbox holds: at most one message for each step, fewer when the gateway is slow."""
        while True:
            await session.outbox.wait()
            session.last_sent_ms = session.sending_since_ms = self._clock()
            await context.write(session.outbox.take())
            session.sending_since_ms = None
