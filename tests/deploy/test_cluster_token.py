"""Every call between services needs the cluster token: none of either service's methods answers without it."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
import pytest

from protos import scheduler_pb2, worker_pb2
from protos.channel import CHANNEL_OPTIONS, Refusals, token_metadata
from protos.credentials import Credentials
from scheduler_svc.server import SchedulerServer
from scheduler_svc.settings import SchedulerSettings
from tests.worker.fakes import make_runner
from worker_svc.fence import StepFence
from worker_svc.service import WorkerService, start_server

TOKEN = "the right one"
METHODS = [
    method
    for file, service in ((scheduler_pb2, "Scheduler"), (worker_pb2, "Worker"))
    for method in file.DESCRIPTOR.services_by_name[service].methods
]


@pytest.fixture
async def addresses() -> AsyncIterator[dict[str, str]]:
    """HOST:PORT of a scheduler and of a worker, by the name of the service."""
    scheduler = SchedulerServer(SchedulerSettings(scheduler_port=0, cluster_token=TOKEN))
    scheduler_address = await scheduler.start()
    with ThreadPoolExecutor(1) as device:
        service = WorkerService("worker", StepFence(make_runner(), device, lambda _fault: None))
        worker, worker_port = await start_server(service, "127.0.0.1", 0, Credentials(TOKEN), Refusals())
        yield {"Scheduler": scheduler_address, "Worker": f"127.0.0.1:{worker_port}"}
        await worker.stop(None)
    await scheduler.stop()


async def status_of(address: str, method: Any, token: str) -> grpc.StatusCode:
    """Call a method with an empty request and return the status."""
    requests = "stream" if method.client_streaming else "unary"
    responses = "stream" if method.server_streaming else "unary"
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = getattr(channel, f"{requests}_{responses}")(f"/{method.containing_service.full_name}/{method.name}")
        under_way = call([b""] if method.client_streaming else b"", metadata=token_metadata(token), timeout=20)
        code: grpc.StatusCode = await under_way.code()
        return code


@pytest.mark.parametrize("token", ["", "a wrong one", TOKEN[:-1], TOKEN + "s"])
async def test_every_method_refuses_a_call_without_the_token(addresses: dict[str, str], token: str) -> None:
    assert {"Register", "Session", "Steps"} <= {method.name for method in METHODS}
    for method in METHODS:
        status = await status_of(addresses[method.containing_service.name], method, token)
        assert status == grpc.StatusCode.UNAUTHENTICATED, method.full_name


@pytest.mark.parametrize("name", ["GetStats", "Health", "Steps", "Register"])
async def test_with_the_token_the_method_itself_answers(addresses: dict[str, str], name: str) -> None:
    method = next(method for method in METHODS if method.name == name)
    status = await status_of(addresses[method.containing_service.name], method, TOKEN)
    assert status not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DEADLINE_EXCEEDED)
