"""A Redis server on loopback for measurements: nothing on disk, empty after each start."""

import shutil
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

import redis

from bench.cell import free_port

START_TIMEOUT_S = 10.0


class RedisServer:
    """A running server, always at the same port. A context manager: leaving it kills the server."""

    def __init__(self) -> None:
        """Start it. Raises RuntimeError where redis-server is not installed, or does not start."""
        if shutil.which("redis-server") is None:
            raise RuntimeError("redis-server is not installed: apt-get install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="quire-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the server."""
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        """Start it, empty."""
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", self._folder.name, "--save", ""]
        self._process = subprocess.Popen(["redis-server", *flags, "--appendonly", "no"], stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            try:
                self.ask("PING")
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        raise RuntimeError(f"redis-server does not answer at port {self.port}")

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, *command: str | bytes | int) -> Any:
        """Return a command's answer."""
        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*command)
