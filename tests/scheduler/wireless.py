"""Workers without a network: what the registry and the lane drivers call is answered when a test says so.

A `Line` is one step stream. What is written to it waits for the worker; what the worker answers is read at once, unless
the line broke before.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import grpc.aio

from protos import worker_pb2
from scheduler_svc import convert
from scheduler_svc.core.types import Seal
from scheduler_svc.lane_driver import LaneIdentity

from .fake_worker import FakeWorker


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise rpc_error(code, details)


class Line:
    """A step stream, as the lane driver sees it, and as the worker does."""

    def __init__(self) -> None:
        self.requests: deque[worker_pb2.StepRequest] = deque()  # that the worker has not taken
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        self._is_broken = False

    async def write(self, request: worker_pb2.StepRequest) -> None:
        if self._is_broken:
            raise asyncio.InvalidStateError("the stream has ended")
        self.requests.append(request)

    async def read(self) -> Any:
        result = await self._results.get()
        if isinstance(result, grpc.aio.AioRpcError):
            raise result
        return result

    def cancel(self) -> None:
        self._is_broken = True

    def answer(self, result: worker_pb2.StepResult) -> None:
        if not self._is_broken:
            self._results.put_nowait(result)

    def end(self, result: Any) -> None:
        """End the stream: with an error, or in order, with EOF."""
        if not self._is_broken:
            self._is_broken = True
            self._results.put_nowait(result)


@dataclass
class WirelessWorker(FakeWorker):
    """A worker process that steps when it is told to."""

    is_still: bool = False  # stopped: it answers nothing and sends no heartbeats, and may go on later
    is_dead: bool = False
    is_draining: bool = False
    lines: list[Line] = field(default_factory=list)  # all that were opened, the newest last

    def step(self) -> worker_pb2.StepResult | None:
        """Run the oldest step that the newest line brought, without a word; None: there is none, or it is refused."""
        if not self.lines or not self.lines[-1].requests:
            return None
        request = self.lines[-1].requests.popleft()
        result = self.answer(request)
        if result is None:
            self.lines[-1].end(rpc_error(grpc.StatusCode.FAILED_PRECONDITION, "a stale epoch or a gap"))
        return result


@dataclass
class WirelessLink:
    """A WorkerLink that needs no network."""

    worker: WirelessWorker

    async def health(self, timeout_ms: int) -> worker_pb2.HealthResponse:
        self._check_reachable()
        return await self.worker.Health(None, None)

    async def manifest(self, identity: LaneIdentity, timeout_ms: int) -> list[Seal]:
        self._check_reachable()
        request = worker_pb2.ManifestRequest(instance_id=identity.lane_id, lane_epoch=identity.lane_epoch)
        parts: AsyncIterator[worker_pb2.ManifestPart] = self.worker.Manifest(request, _Context())
        return [seal async for part in parts for seal in convert.seals_from_wire(part.seals)]

    def steps(self) -> Line:
        self.worker.lines.append(Line())
        if self.worker.is_dead:
            self.worker.lines[-1].end(rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody listens"))
        return self.worker.lines[-1]

    async def redial(self, timeout_ms: int) -> None:
        if self.worker.is_still or self.worker.is_dead:
            raise TimeoutError

    async def close(self) -> None:
        for line in self.worker.lines:
            line.cancel()

    def _check_reachable(self) -> None:
        if self.worker.is_still or self.worker.is_dead:
            raise rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody answers")
