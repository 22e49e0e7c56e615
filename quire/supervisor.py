"""Services as child processes: started, read, started again when they die, and stopped.

Nothing here knows what the services do. A service is `python -m MODULE` with its settings in QUIRE_* variables; it
prints one line a log record, and `ready on ADDRESS` in one of them when it is ready. Each child leads a process group
of its own, so that Ctrl-C reaches the supervisor alone, which then stops the children in order. Should the supervisor
be killed, the kernel kills the children (Linux).
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 60.0  # a child that lived this long starts its backoff anew
LONGEST_LINE_BYTES = 1024 * 1024

_READY = re.compile(r"\bready on (\S+)")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

ShowLine = Callable[[str, str], None]  # (service name, line)
Announce = Callable[[str], None]  # a line of the supervisor's own


class ServiceDiedError(Exception):
    """A service ended before its cell was ready."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"the {name} did not start ({describe_exit(exit_code)})")
        self.name, self.exit_code = name, exit_code


def describe_exit(exit_code: int) -> str:
    """Return words for what `Process.returncode` says: negative numbers are signals."""
    return f"exit code {exit_code}" if exit_code >= 0 else f"killed by {signal.Signals(-exit_code).name}"


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. Runs in the child, between fork and exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Service:
    """One service of a cell and the process that runs it now."""

    def __init__(self, name: str, module: str, environ: Mapping[str, str], show_line: ShowLine) -> None:
        self.name = name
        self.environ = dict(environ)
        self._module = module
        self._show_line = show_line
        self._process: asyncio.subprocess.Process | None = None
        self._lines: asyncio.Task[None] | None = None
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        """Process id of the process started last; None when none was."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; the one before it must have ended. Raises OSError where the machine makes none."""
        read_end, write_end = os.pipe()
        reading = os.fdopen(read_end, "rb")
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=self.environ,
                process_group=0,
                preexec_fn=_die_with_parent,
            )
        except OSError:
            reading.close()
            raise
        finally:
            os.close(write_end)
        self._lines = asyncio.create_task(self._show_lines(reading))

    async def address(self) -> str:
        """Wait for the service's first ready line and return the address in it."""
        return await asyncio.shield(self._address)

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code (negative: minus the signal).

        What it leaves behind of its process group is killed: it must not keep a port, memory or the pipe.
        """
        assert self._process is not None, f"{self.name} was never started"
        exit_code = await self._process.wait()
        self.send_signal(signal.SIGKILL)
        if self._lines is not None:
            await self._lines
        return exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all that it started; nothing happens when there is none."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds; return when the process has ended."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        self.send_signal(signal.SIGKILL)
        await self.wait()

    async def _show_lines(self, reading: BinaryIO) -> None:
        """Hand on the process's lines until no process holds the other end of the pipe. Closes `reading`."""
        reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), reading
        )
        with contextlib.closing(transport):
            while line := await _read_line(reader):
                self._take_line(line.rstrip("\n"))

    def _take_line(self, line: str) -> None:
        if not self._address.done() and (ready := _READY.search(line)):
            self._address.set_result(ready.group(1))
        self._show_line(self.name, line)


async def _read_line(stream: asyncio.StreamReader) -> str:
    """Return the next line with its line end, "" at the end of the stream; an endless line comes in parts."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        raw = error.partial
    except asyncio.LimitOverrunError as error:
        raw = await stream.readexactly(error.consumed)
    return raw.decode(errors="replace")


class Supervisor:
    """Keeps a set of services running.

    Until `expect_to_live` is called a service that ends is a failed start: its `keep` raises ServiceDiedError. After it
    a service that ends is started again, with a backoff that doubles.
    """

    def __init__(self, announce: Announce, show_line: ShowLine) -> None:
        self._announce = announce
        self._show_line = show_line
        self._services: list[Service] = []
        self._all_started = False

    async def start(self, name: str, module: str, environ: Mapping[str, str]) -> Service:
        """Start `python -m module` under `name`; the caller then runs `keep` on it."""
        service = Service(name, module, environ, self._show_line)
        self._services.append(service)
        await service.start()
        return service

    def expect_to_live(self) -> None:
        """From now on a service that dies is started again."""
        self._all_started = True

    async def keep(self, service: Service) -> None:
        """Run the service's process, and the next one when it dies, until cancelled. Raises ServiceDiedError."""
        clock = asyncio.get_running_loop().time
        backoff_s = FIRST_BACKOFF_S
        while True:
            begin = clock()
            exit_code = await service.wait()
            if not self._all_started:
                raise ServiceDiedError(service.name, exit_code)
            if clock() - begin > HEALTHY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._announce(
                f"the {service.name} died ({describe_exit(exit_code)}); starting it again in {backoff_s:g} s"
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
            try:
                await service.start()
            except OSError as error:  # of the machine, which may pass; the dead process is still the last
                self._announce(f"the {service.name} cannot be started: {error}")

    async def stop(self, grace_s_by_name: Mapping[str, float]) -> None:
        """Stop services one after another, in the mapping's order; names that were never started are passed over.

        The grace periods, in seconds, are what passes between SIGTERM and SIGKILL.
        """
        services = {service.name: service for service in self._services}
        for name, grace_s in grace_s_by_name.items():
            if name in services:
                await services[name].stop(grace_s)

    def kill(self) -> None:
        """Send SIGKILL to every service."""
        for service in self._services:
            service.send_signal(signal.SIGKILL)
