"""A real cell for measurements and end-to-end tests: `quire serve` on free ports, and its log."""

import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil

from protos import scheduler_pb2, scheduler_pb2_grpc
from protos.channel import CHANNEL_OPTIONS, token_metadata

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 300.0  # a first start imports the model and compiles kernels
STOP_TIMEOUT_S = 60.0
_URL = re.compile(r"https?://\S+")
_SEVERE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback|^quire serve: the ", re.IGNORECASE | re.MULTILINE)

Flags = Mapping[str, str | int | float | bool]


class CellError(Exception):
    """The cell did not start, or did not stop; the message ends with its log."""


def free_port() -> int:
    """Return a TCP port of loopback on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def model_folder(model: str) -> str:
    """Return the folder that `--model` stands for."""
    command = [sys.executable, "-m", "worker_svc.loader", model]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout.strip()


def as_arguments(flags: Flags) -> list[str]:
    """Return flags by field name (`block_size=16`, `enable_prefix_caching=False`) as a command line."""
    arguments = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


class Cell:
    """A running `quire serve`. A context manager: leaving it stops the cell and raises CellError if that fails."""

    def __init__(self, **flags: str | int | float | bool) -> None:
        """Start the cell and wait until it can serve. Raises CellError."""
        self.scheduler_address = f"127.0.0.1:{free_port()}"
        self.token = secrets.token_hex(8)
        own: dict[str, str | int | float | bool] = {
            "port": 0,
            "scheduler_port": int(self.scheduler_address.rpartition(":")[2]),
            "cluster_token": self.token,
        }
        self._folder = tempfile.TemporaryDirectory(prefix="quire-cell-")
        self._log_path = Path(self._folder.name) / "log"
        with self._log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", "serve", *as_arguments(own | flags)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        self.url = self._wait_for_url()

    def __enter__(self) -> Self:
        """Return the cell."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the cell."""
        self.close()

    @property
    def log(self) -> str:
        """All that the cell wrote to standard error so far."""
        return self._log_path.read_text(errors="replace")

    def severe_lines(self) -> list[str]:
        """Return the log's lines that are warnings or worse."""
        return [line for line in self.log.splitlines() if _SEVERE.search(line)]

    def service_pid(self, module: str) -> int:
        """Return the process id of a service now, by its module: gateway, scheduler_svc or worker_svc."""
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[-2:] == ["-m", module]:
                return child.pid
        raise CellError(f"no process runs {module}\n{self.log}")

    @contextmanager
    def scheduler(self) -> Iterator[scheduler_pb2_grpc.SchedulerStub]:
        """Yield a client of the cell's scheduler; calls take `metadata=cell.metadata`."""
        with grpc.insecure_channel(self.scheduler_address, options=list(CHANNEL_OPTIONS)) as channel:
            yield scheduler_pb2_grpc.SchedulerStub(channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata that calls to the cell's services carry."""
        return token_metadata(self.token)

    def stats(self) -> scheduler_pb2.CellStats:
        """Return the cell's state now."""
        with self.scheduler() as stub:
            stats: scheduler_pb2.CellStats = stub.GetStats(
                scheduler_pb2.GetStatsRequest(), metadata=self.metadata, timeout=10
            )
        return stats

    def stop(self) -> int:
        """Stop the cell as Ctrl-C does and return its exit code. Raises CellError when it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise CellError(f"the cell did not stop within {STOP_TIMEOUT_S:g} s\n{self.log}") from None

    def close(self) -> None:
        """Stop the cell and forget its log."""
        try:
            exit_code = self.stop()
            if exit_code != 0:
                raise CellError(f"the cell ended with exit code {exit_code}\n{self.log}")
        finally:
            self._discard()

    def _wait_for_url(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        select.select([stdout], [], [], START_TIMEOUT_S)
        found = _URL.search(stdout.readline()) if time.monotonic() < deadline else None
        if found is None:
            self.process.kill()
            self.process.wait()
            message = f"the cell did not start\n{self.log}"
            self._discard()
            raise CellError(message)
        return found.group()

    def _discard(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._folder.cleanup()
