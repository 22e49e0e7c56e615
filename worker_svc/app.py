"""A loaded worker's life: listen, register, run steps on one device thread, and stop in order."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor

from kernels.formats import RECIPES, Format
from protos.channel import PROTOCOL_VERSION, Refusals
from protos.credentials import Credentials
from protos.scheduler_pb2 import RegisterRequest
from worker_svc.assembly import LoadedWorker
from worker_svc.errors import DeviceHungError
from worker_svc.fence import StepFence
from worker_svc.registration import Registration
from worker_svc.service import WorkerService, start_server
from worker_svc.settings import WorkerSettings

logger = logging.getLogger(__name__)

_WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")


async def serve(
    worker: LoadedWorker, device: ThreadPoolExecutor, settings: WorkerSettings, credentials: Credentials
) -> None:
    """Listen, register and run steps until SIGTERM or SIGINT, then drain. Raises StartupError, or DeviceFaultError.

    `device` is the one thread that loaded the worker; it is shut down at the end.
    After a DeviceHungError the device thread is left behind, and a process that ends as usual would wait for it.
    """
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _settle, end, None)
    try:
        fence = StepFence(worker.runner, device, lambda fault: _settle(end, fault))
        offer = make_offer(worker)
        service = WorkerService(offer.instance_id, fence)
        refusals = Refusals()
        server, port = await start_server(service, settings.host, settings.worker_port, credentials, refusals)
        bound = f"{_in_address(settings.host)}:{port}"
        offer.address = settings.worker_address or f"{_reachable(settings.host)}:{port}"
        registration = Registration(settings.scheduler, credentials, offer, fence, refusals)
        task = asyncio.create_task(registration.run())
        task.add_done_callback(lambda task: None if task.cancelled() else _settle(end, task.exception()))
        # What loading made stays for good: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        logger.info("ready on %s", bound)
        try:
            await end
            task.cancel()
            await _drain(registration, settings.worker_drain_seconds)
        finally:
            task.cancel()
            # Streams first: told of a fence, the scheduler would take it that another one has this worker now.
            await server.stop(None)
            await fence.retire()
    except BaseException as error:
        device.shutdown(wait=not isinstance(error, DeviceHungError))
        raise
    device.shutdown()
    logger.info("stopped")


async def _drain(registration: Registration, patience_s: float) -> None:
    """Let what runs here end; a second signal ends the wait."""
    waiting = asyncio.create_task(registration.drain(patience_s))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, waiting.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


def make_offer(worker: LoadedWorker) -> RegisterRequest:
    """Return what a worker registers with, under a new instance id, without its address and lane epoch."""
    return RegisterRequest(
        protocol_version=PROTOCOL_VERSION,
        instance_id=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        model=worker.model,
        num_slabs=worker.plan.num_slabs,
        slab_bytes=worker.plan.layout.slab_bytes,
        native_blocks_per_slab=worker.plan.layout.slab_blocks,
        blocks_per_slab=[worker.places_per_slab.get(fmt, 0) for fmt in Format],
        recipe_versions=[RECIPES[fmt].version for fmt in Format],
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
    )


def _settle(end: asyncio.Future[None], fault: BaseException | None) -> None:
    """Resolve the future that the process waits for: the first reason to end counts."""
    if end.done():
        return
    if fault is None:
        end.set_result(None)
    else:
        end.set_exception(fault)


def _reachable(host: str) -> str:
    """Return the host at which the scheduler finds a server that listens on `host`."""
    return socket.gethostname() if host in _WILDCARD_HOSTS else _in_address(host)


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
