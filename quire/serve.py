"""`quire serve`: check what can be checked at once, find the model, start the cell, say where it is, keep it running.

Standard output gets one line, when the cell can serve: the URL. Everything else is on standard error: progress, the
services' log lines under their names, and what went wrong. Exit codes: 0 after Ctrl-C or SIGTERM, 1 when the cell could
not start, 2 for a mistake in the flags.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

from gateway.settings import GatewaySettings
from protos.channel import is_loopback
from protos.credentials import Credentials
from protos.settings import SettingsMistakeError, read_settings
from protos.watched_files import FileMistakeError
from quire.settings import ServeSettings, child_environ
from quire.supervisor import Service, ServiceDiedError, Supervisor, describe_exit
from scheduler_svc.core.precision import name_of
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

LOOPBACK = "127.0.0.1"
BUNDLED_NAME = "SmolLM2-135M-Instruct"
READY_POLL_S = 0.1
STOP_GRACE_S = 5.0  # between SIGTERM and SIGKILL, beyond the time that running requests get
READY_TIMEOUT_S = 5.0

_LEVELS = ("debug", "info", "warning", "error", "critical")
_LEVEL = re.compile(rf"\b({'|'.join(_LEVELS)})\b", re.IGNORECASE)
_LEVEL_COLUMNS = 48  # a log line names its level within its first columns; later words are the message


class StartError(Exception):
    """The cell cannot start; the message is one line for the person who typed the command, "" when they have it."""


class LogView:
    """Prints the services' log lines that are severe enough, and those without a level: progress and tracebacks."""

    def __init__(self, log_level: str) -> None:
        self._least = _LEVELS.index(log_level)
        self._starting = True

    def cell_is_ready(self) -> None:
        """Stop showing the worker's info lines as progress."""
        self._starting = False

    def show_line(self, name: str, line: str) -> None:
        """Print a service's line under its name, if it is to be shown."""
        found = _LEVEL.search(line[:_LEVEL_COLUMNS])
        level = _LEVELS.index(found.group(1).lower()) if found else len(_LEVELS)
        # Loading weights and compiling kernels take their time: until the cell is ready its worker says where it is.
        least = min(self._least, _LEVELS.index("info")) if self._starting and name.startswith("worker") else self._least
        if level >= least and line.strip():
            _print_line(f"{name:>9} | {line}")


def announce(line: str) -> None:
    """Print a line of the supervisor's own on standard error."""
    _print_line(f"quire serve: {line}")


def _print_line(line: str) -> None:
    # Whoever read standard error may be gone, or its disk full: that is no reason to stop serving.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def check_port(host: str, port: int) -> None:
    """Raise StartError when a server could not listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartError(f"port {port} on {host}: {reason.lower()} (--port and --host choose another)") from None


async def find_model(model: str) -> str:
    """Return the folder of the model, after fetching or importing it where that is needed. Raises StartError.

    A process of its own does it: it needs libraries that the supervisor should not carry while it serves.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc.loader", model, stdout=PIPE, process_group=0
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    assert process.returncode is not None, "it has ended"
    if process.returncode < 0:
        raise StartError(f"finding the model {model} was cut short ({describe_exit(process.returncode)})")
    if process.returncode > 0:
        raise StartError("")  # the loader has said why
    return output.decode().strip()


def served_name(model: str) -> str:
    """Return the name under which a model is served unless the person chooses one: its own, not its cache folder's."""
    if model in ("", "bundled"):
        return BUNDLED_NAME
    path = Path(model).expanduser()
    if not path.exists():
        return model  # a Hub id
    return path.stem if path.is_file() else path.resolve().name


async def is_ready(address: str, port: int) -> bool:
    """Return whether the gateway answers GET /ready with status 200."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(READY_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address, port)
            with contextlib.closing(writer):
                writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status_line = await reader.readline()
        return b" 200 " in status_line
    return False


async def wait_until_ready(address: str, port: int) -> None:
    """Return when the gateway says that the cell can serve."""
    while True:
        if await is_ready(address, port):
            return
        await asyncio.sleep(READY_POLL_S)


def local_address(host: str) -> str:
    """Return where a server that listens on `host` is reached from this machine.

    Not by the name localhost: another server may have the same port in the other family of addresses.
    """
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def local_url(host: str, port: int) -> str:
    """Return the URL at which a client on this machine reaches a server that listens on `host`."""
    address = local_address(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def device_of_worker(idx: int, num_workers: int, device: str) -> str:
    """Return the `--device` of one of a machine's workers: with GPUs each has its own, unless one is named."""
    return f"{device}:{idx}" if num_workers > 1 and device in ("auto", "cuda") else device


class Cell:
    """A scheduler, workers and a gateway on this machine."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._log = LogView(settings.log_level)
        self._supervisor = Supervisor(announce, self._log.show_line)

    async def run(self) -> None:
        """Start the cell and keep it running until cancelled. Raises StartError."""
        settings = self._settings
        check_port(settings.host, settings.port)
        folder = await find_model(settings.model)
        try:
            async with asyncio.TaskGroup() as keepers:
                await self._start(folder, keepers)
        except* ServiceDiedError as group:
            died = group.exceptions[0]
            # A service that ends with code 1 has said why in one line of its own.
            known = isinstance(died, ServiceDiedError) and died.exit_code == 1
            raise StartError("" if known else str(died)) from None

    async def stop(self) -> None:
        """Let running requests finish, then stop every service: each before those that it would miss."""
        grace_s = dict.fromkeys(("gateway", "scheduler", *self._worker_names), STOP_GRACE_S)
        await self._supervisor.stop(grace_s | {"gateway": self._settings.gateway_drain_seconds + STOP_GRACE_S})

    def kill(self) -> None:
        """End every service at once."""
        self._supervisor.kill()

    async def _start(self, folder: str, keepers: asyncio.TaskGroup) -> None:
        settings = self._settings
        token = settings.cluster_token or secrets.token_hex(16)
        environ = child_environ(settings, SchedulerSettings, host=LOOPBACK, cluster_token=token)
        scheduler = await self._start_service("scheduler", "scheduler_svc", environ, keepers)
        address = await scheduler.address()
        # Started again, a service must be where the others look for it.
        scheduler.environ |= {"QUIRE_SCHEDULER_PORT": address.rpartition(":")[2]}

        inside = {"cluster_token": token, "model": folder, "scheduler": address}
        await self._start_workers(inside, keepers)
        name = settings.served_model_name or served_name(settings.model)
        environ = child_environ(settings, GatewaySettings, served_model_name=name, **inside)
        gateway = await self._start_service("gateway", "gateway", environ, keepers)
        port = int((await gateway.address()).rpartition(":")[2])
        gateway.environ |= {"QUIRE_PORT": str(port)}

        await wait_until_ready(local_address(settings.host), port)
        self._log.cell_is_ready()
        self._supervisor.expect_to_live()
        print(f"Quire is ready on {local_url(settings.host, port)}", flush=True)

    @property
    def _worker_names(self) -> list[str]:
        num_workers = self._settings.workers
        return ["worker"] if num_workers == 1 else [f"worker-{number}" for number in range(1, num_workers + 1)]

    async def _start_workers(self, inside: dict[str, str], keepers: asyncio.TaskGroup) -> None:
        """Start the workers, the first before the others: it compiles what all of them load."""
        settings, num_workers = self._settings, self._settings.workers
        num_threads = settings.num_threads
        if num_threads is None and num_workers > 1:
            num_threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
        kv_formats = settings.kv_formats
        if kv_formats == "all":  # that is all of the policy
            kv_formats = ",".join(name_of(fmt) for fmt in settings.precision().formats)
        own = {"num_threads": num_threads, "kv_formats": kv_formats}
        workers: list[Service] = []
        for idx, name in enumerate(self._worker_names):
            if idx == 1:
                await workers[0].address()
            device = device_of_worker(idx, num_workers, settings.device)
            environ = child_environ(settings, WorkerSettings, host=LOOPBACK, device=device, **own, **inside)
            workers.append(await self._start_service(name, "worker_svc", environ, keepers))
        await asyncio.gather(*(worker.address() for worker in workers))

    async def _start_service(
        self, name: str, module: str, environ: dict[str, str], keepers: asyncio.TaskGroup
    ) -> Service:
        service = await self._supervisor.start(name, module, environ)
        keepers.create_task(self._supervisor.keep(service))
        return service


async def serve(settings: ServeSettings) -> int:
    """Run a cell until a signal or a failed start ends it; return the exit code."""
    cell = Cell(settings)
    running = asyncio.create_task(cell.run())
    num_signals = 0

    def take_signal() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            cell.kill()
        elif running.cancel():
            announce("stopping (once more to stop at once)")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, take_signal)
    try:
        await running
    except asyncio.CancelledError:
        return 0
    except StartError as error:
        if str(error):
            announce(str(error))
        return 1
    finally:
        await cell.stop()
    return 0


def main(argv: Sequence[str]) -> int:
    """Serve until stopped; return the exit code."""
    try:
        settings = read_settings(ServeSettings, argv)
        Credentials.of_server(settings, LOOPBACK)
    except (SettingsMistakeError, FileMistakeError) as error:
        announce(f"{error} (quire serve --help shows every flag)")
        return 2
    if not (is_loopback(settings.host) or settings.api_keys or settings.api_keys_file):
        announce(
            f"listening on {settings.host}: everybody who reaches this machine can use the model "
            "(--api-keys-file lets in those with a key alone)"
        )
    return asyncio.run(serve(settings))
