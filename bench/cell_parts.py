"""A cell whose parts can be hurt one by one: services under the supervisor, each worker behind links that can be cut.

gateway ──▶ scheduler ◀──link── worker 1        the way on which it registers and sends heartbeats
                └───────link──▶ worker 1        the way on which it is stepped
"""

import asyncio
import os
import random
import secrets
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

import grpc.aio

from bench.cell import free_port, model_folder
from bench.redis_server import RedisServer
from protos import scheduler_pb2, scheduler_pb2_grpc
from protos.channel import CHANNEL_OPTIONS, token_metadata
from quire.serve import is_ready
from quire.supervisor import Service, Supervisor

READY_POLL_S = 0.1


class Link:
    """A TCP port that hands on to another one. While it is cut nothing passes and nothing is closed."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    def cut(self) -> None:
        """Let nothing pass."""
        self._is_whole.clear()

    def mend(self) -> None:
        """Hand on again, what came meanwhile first."""
        self._is_whole.set()

    async def stop(self) -> None:
        """Listen no more, and close all that is open."""
        if self._server is not None:
            self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self._hand_on(source, sink))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _hand_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                await self._is_whole.wait()
                sink.write(data)
                await sink.drain()
        sink.close()


class CellParts:
    """A scheduler, workers, a gateway and Redis, each started again when it dies. An async context manager."""

    def __init__(self, model: str, num_workers: int, settings: Mapping[str, str]) -> None:
        """Prepare a cell; `settings` are QUIRE_* variables that all services get."""
        self.log: list[str] = []
        self.redis = RedisServer()
        self.workers: list[Service] = []
        self.links: list[tuple[Link, Link]] = []  # of each worker
        self.scheduler: Service
        self._model, self._num_workers, self._settings = model, num_workers, settings
        self._token = secrets.token_hex(8)
        self._port, self._scheduler_port = free_port(), free_port()
        self._supervisor = Supervisor(self.log.append, lambda name, line: self.log.append(f"{name} | {line}"))
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where clients find the gateway."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        """Start everything, the first worker before the others; return when the cell can serve."""
        folder = await asyncio.to_thread(model_folder, self._model)
        cell = {"model": folder, "scheduler": f"127.0.0.1:{self._scheduler_port}"}
        self.scheduler = await self._start(
            "scheduler",
            "scheduler_svc",
            scheduler_port=self._scheduler_port,
            redis_url=self.redis.url,
            cell_name="parts",
        )
        await self.scheduler.address()
        for number in range(self._num_workers):
            worker_port = free_port()
            links = Link(self._scheduler_port), Link(worker_port)
            for link in links:
                await link.start()
            up, down = (f"127.0.0.1:{link.port}" for link in links)
            worker = await self._start(
                f"worker-{number + 1}",
                "worker_svc",
                **cell | {"scheduler": up},
                worker_port=worker_port,
                worker_address=down,
                num_threads=1,
            )
            await worker.address()
            self.workers.append(worker)
            self.links.append(links)
        await self._start("gateway", "gateway", **cell, port=self._port)
        while (  # noqa: ASYNC110  # nobody tells
            len((await self.stats()).lanes) < self._num_workers or not await is_ready("127.0.0.1", self._port)
        ):
            await asyncio.sleep(READY_POLL_S)
        self._supervisor.expect_to_live()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End everything at once."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._supervisor.kill()
        await self._supervisor.stop(dict.fromkeys(("gateway", "scheduler", *(w.name for w in self.workers)), 1.0))
        for link in (link for links in self.links for link in links):
            await link.stop()
        self.redis.__exit__(kind, error, traceback)

    async def stats(self) -> scheduler_pb2.CellStats:
        """Return the cell's state now; an empty one while the scheduler is away."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._scheduler_port}", options=CHANNEL_OPTIONS) as channel:
            stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)
            try:
                return await stub.GetStats(
                    scheduler_pb2.GetStatsRequest(), metadata=token_metadata(self._token), timeout=5
                )
            except grpc.aio.AioRpcError:
                return scheduler_pb2.CellStats()

    async def _start(self, name: str, module: str, **fields: str | int) -> Service:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("QUIRE_")}
        values = {"cluster_token": self._token, "log_level": "info", **fields}
        environ |= {f"QUIRE_{key.upper()}": str(value) for key, value in values.items()} | dict(self._settings)
        service = await self._supervisor.start(name, module, environ)
        self._keepers.append(asyncio.create_task(self._supervisor.keep(service)))
        return service


Fault = Callable[[CellParts, random.Random], Awaitable[None]]


def _signal(service: Service, number: signal.Signals) -> None:
    if service.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(service.pid, number)


async def kill_worker(cell: CellParts, rng: random.Random) -> None:
    """Kill a worker with SIGKILL; the supervisor starts it again."""
    _signal(rng.choice(cell.workers), signal.SIGKILL)


async def stop_worker(cell: CellParts, rng: random.Random) -> None:
    """Stop a worker for longer than its lane waits for it."""
    worker = rng.choice(cell.workers)
    pid = worker.pid
    _signal(worker, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1, 6))
    if worker.pid == pid:
        _signal(worker, signal.SIGCONT)


async def cut_worker(cell: CellParts, rng: random.Random) -> None:
    """Let nothing pass between a worker and the scheduler."""
    links = rng.choice(cell.links)
    for link in links:
        link.cut()
    await asyncio.sleep(rng.uniform(1, 6))
    for link in links:
        link.mend()


async def kill_scheduler(cell: CellParts, rng: random.Random) -> None:
    """Kill the scheduler with SIGKILL; the supervisor starts it again."""
    del rng
    _signal(cell.scheduler, signal.SIGKILL)


async def stop_scheduler(cell: CellParts, rng: random.Random) -> None:
    """Stop the scheduler for a while."""
    pid = cell.scheduler.pid
    _signal(cell.scheduler, signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1, 5))
    if cell.scheduler.pid == pid:
        _signal(cell.scheduler, signal.SIGCONT)


async def kill_redis(cell: CellParts, rng: random.Random) -> None:
    """Kill Redis with SIGKILL, and start it again, empty, a while later."""
    await asyncio.to_thread(cell.redis.kill)
    await asyncio.sleep(rng.uniform(0.5, 4))
    await asyncio.to_thread(cell.redis.start)


FAULTS: Mapping[str, Fault] = {
    "worker killed": kill_worker,
    "worker stopped": stop_worker,
    "worker cut off": cut_worker,
    "scheduler killed": kill_scheduler,
    "scheduler stopped": stop_scheduler,
    "Redis killed": kill_redis,
}
