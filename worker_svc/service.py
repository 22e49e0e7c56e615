"""The worker's gRPC service: translates calls into the fence's operations, and decides nothing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from protos import worker_pb2 as pb
from protos.channel import SERVER_OPTIONS, ErrorInterceptor, Refusals, TokenInterceptor
from protos.credentials import Credentials
from protos.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from worker_svc.errors import StartupError, WorkerError, WrongInstanceError
from worker_svc.fence import StepFence

_Answers = asyncio.Queue["asyncio.Future[pb.StepResult] | None"]


class WorkerService(WorkerServicer):
    """See protos/worker.proto for the contract of each call."""

    def __init__(self, instance_id: str, fence: StepFence) -> None:
        self._instance_id = instance_id
        self._fence = fence

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:  # noqa: N802
        """Say who answers here."""
        return pb.HealthResponse(instance_id=self._instance_id, lane_epoch=self._fence.lane_epoch)

    async def Manifest(self, request: pb.ManifestRequest, context: Any) -> AsyncIterator[pb.ManifestPart]:  # noqa: N802
        """Adopt the lane epoch, then stream every seal."""
        if request.instance_id != self._instance_id:
            raise WrongInstanceError(f"this is {self._instance_id}, not {request.instance_id}")
        for part in await self._fence.adopt(request.lane_epoch):
            yield part

    async def Steps(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.StepResult]:  # noqa: N802
        """Queue steps as they come and answer each in order."""
        answers: _Answers = asyncio.Queue()
        reader = asyncio.create_task(self._read_steps(request_iterator, answers))
        try:
            while (answer := await answers.get()) is not None:
                # A repeat on another stream may wait for the same answer.
                yield await asyncio.shield(answer)
            await reader
        finally:
            reader.cancel()

    async def _read_steps(self, requests: Any, answers: _Answers) -> None:
        """Queue the answer of each step; end at the first one that is refused, after the answers before it."""
        try:
            async for request in requests:
                answers.put_nowait(self._fence.submit(request))
        except WorkerError as error:
            refused: asyncio.Future[pb.StepResult] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            answers.put_nowait(refused)
        finally:
            answers.put_nowait(None)


async def start_server(
    service: WorkerService, host: str, port: int, credentials: Credentials, refusals: Refusals
) -> tuple[grpc.aio.Server, int]:
    """Start serving; return the server and its port. Raises StartupError when the port cannot be had."""
    interceptors = (TokenInterceptor(credentials.token, refusals), ErrorInterceptor(refusals))
    server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(service, server)
    shown_host = f"[{host}]" if ":" in host else host
    try:
        bound_port = credentials.add_port(server, f"{shown_host}:{port}")
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {shown_host}:{port} (is the port in use?)") from error
    await server.start()
    return server, bound_port
