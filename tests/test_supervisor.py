"""The supervisor with services of a few lines: what it starts, shows, starts again and stops."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from quire import supervisor as supervisor_module
from quire.supervisor import Service, ServiceDiedError, Supervisor

SLEEPER = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("INFO ready on 127.0.0.1:1234", file=sys.stderr, flush=True)
threading.Event().wait()
"""
STUBBORN = SLEEPER.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
BROKEN = "import sys; sys.exit('ERROR no such folder: /nowhere')"

AddService = Callable[[str, str], tuple[str, dict[str, str]]]


@pytest.fixture
def add_service(tmp_path: Path) -> AddService:
    """Return a function that writes a module and returns its name and the environment that finds it."""

    def add(name: str, source: str) -> tuple[str, dict[str, str]]:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name, os.environ | {"PYTHONPATH": str(tmp_path)}

    return add


class Shown:
    """What a supervisor printed, and a way to wait for a line of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Condition()

    def announce(self, line: str) -> None:
        self.show_line("quire", line)

    def show_line(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")
        self._notifier = asyncio.ensure_future(self._notify())

    async def wait_for(self, text: str, count: int = 1) -> None:
        async with asyncio.timeout(20), self._changed:
            await self._changed.wait_for(lambda: sum(text in line for line in self.lines) >= count)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@pytest.fixture
async def shown() -> Shown:
    return Shown()


@pytest.fixture
async def supervisor(shown: Shown) -> AsyncIterator[Supervisor]:
    made = Supervisor(shown.announce, shown.show_line)
    yield made
    await made.stop({"worker": 5})


def pid_of(service: Service) -> int:
    assert service.pid is not None
    return service.pid


async def test_address_is_that_of_the_ready_line(supervisor: Supervisor, add_service: AddService) -> None:
    service = await supervisor.start("worker", *add_service("sleeper", SLEEPER))
    async with asyncio.timeout(20):
        assert await service.address() == "127.0.0.1:1234"


async def test_failed_first_start_is_an_error_that_names_the_service(
    supervisor: Supervisor, shown: Shown, add_service: AddService
) -> None:
    service = await supervisor.start("worker", *add_service("broken", BROKEN))
    with pytest.raises(ServiceDiedError, match=r"the worker did not start \(exit code 1\)"):
        await supervisor.keep(service)
    assert shown.lines == ["worker: ERROR no such folder: /nowhere"]


@pytest.fixture
async def kept(
    supervisor: Supervisor, shown: Shown, add_service: AddService, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """A service that is ready, and started again at once when it dies."""
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.01)
    service = await supervisor.start("worker", *add_service("sleeper", SLEEPER))
    supervisor.expect_to_live()
    keeper = asyncio.create_task(supervisor.keep(service))
    await shown.wait_for("ready on")
    yield service
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper


async def test_killed_service_is_started_again(kept: Service, shown: Shown) -> None:
    first_pid = pid_of(kept)
    os.kill(first_pid, signal.SIGKILL)
    await shown.wait_for("ready on", count=2)
    assert "quire: the worker died (killed by SIGKILL); starting it again in 0.01 s" in shown.lines
    assert pid_of(kept) != first_pid


async def test_service_that_the_machine_cannot_start_is_tried_again(
    kept: Service, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/such/python")
        os.kill(pid_of(kept), signal.SIGKILL)
        await shown.wait_for("the worker cannot be started: [Errno 2]", count=2)
    await shown.wait_for("ready on", count=2)


async def test_stop_kills_what_ignores_sigterm(supervisor: Supervisor, shown: Shown, add_service: AddService) -> None:
    service = await supervisor.start("worker", *add_service("stubborn", STUBBORN))
    await shown.wait_for("ready on")
    await supervisor.stop({"gateway": 5, "worker": 0.1})
    assert not psutil.pid_exists(pid_of(service))


async def test_grandchild_dies_with_its_service(supervisor: Supervisor, shown: Shown, add_service: AddService) -> None:
    parent = """
    import subprocess, sys, threading
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    print("ready on", child.pid, flush=True)
    threading.Event().wait()
    """
    service = await supervisor.start("worker", *add_service("parent", parent))
    grandchild = psutil.Process(int(await service.address()))
    os.kill(pid_of(service), signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await service.wait() == -signal.SIGKILL
    psutil.wait_procs([grandchild], timeout=5)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_services_die_with_a_killed_supervisor(add_service: AddService, tmp_path: Path) -> None:
    module, environ = add_service("sleeper", SLEEPER)
    script = f"""
    import asyncio, os
    from quire.supervisor import Supervisor

    async def main():
        supervisor = Supervisor(print, lambda name, line: None)
        service = await supervisor.start("worker", {module!r}, dict(os.environ))
        await service.address()
        print(service.pid, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
    """
    root = str(Path(__file__).resolve().parents[1])
    environ = environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), root])}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=environ
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, alive = psutil.wait_procs([child], timeout=5)
    assert gone or alive[0].status() == psutil.STATUS_ZOMBIE
