"""The sandbox: what passes, and what is stopped."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from quire.eval import sandbox as module
from quire.eval.errors import EvalMistakeError
from quire.eval.sandbox import Outcome, Sandbox

MIB = 1 << 20


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox.open(cpu_seconds=2, memory_bytes=256 * MIB)


def test_program_that_comes_to_its_end_passes(sandbox: Sandbox) -> None:
    assert sandbox.run("import math\nassert math.isqrt(10) == 3\nprint('x' * 10**7)\n") is Outcome.PASSED


@pytest.mark.parametrize(
    "program",
    ["assert 1 == 2", "def f(:", "raise SystemExit(0)", "import os; os._exit(0)", "import os; os.abort()"],
    ids=["assertion", "syntax", "exit", "exit-at-once", "abort"],
)
def test_program_that_does_not_fails(sandbox: Sandbox, program: str) -> None:
    assert sandbox.run(program) is Outcome.FAILED


def test_endless_loop_is_stopped(sandbox: Sandbox) -> None:
    assert sandbox.run("while True:\n    pass\n") is Outcome.TIMED_OUT


def test_endless_sleep_is_stopped(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STARTUP_SECONDS", 0.5)
    assert sandbox.run("import time\ntime.sleep(1000)\n") is Outcome.TIMED_OUT


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert sandbox.run("x = bytearray(100 << 20)\n") is Outcome.PASSED
    assert sandbox.run("x = bytearray(400 << 20)\n") is Outcome.FAILED
    assert sandbox.run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n") is Outcome.FAILED


def test_files_are_bounded_and_gone_afterwards(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert sandbox.run("open('small', 'w').write('x')\nassert open('small').read() == 'x'\n") is Outcome.PASSED
    assert sandbox.run("open('large', 'wb').write(bytes(2 << 20))\n") is Outcome.FAILED
    assert list(tmp_path.iterdir()) == []


def test_processes_are_bounded(sandbox: Sandbox) -> None:
    if os.geteuid() == 0 and sandbox.isolation != "user":
        pytest.skip("the kernel counts no processes of root's, and does not permit another user here")
    # Children only wait: it is the program's own process that is refused one more.
    forks = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(60)\n"
    assert sandbox.run(forks) is Outcome.FAILED


def test_child_does_not_pass_for_its_parent(sandbox: Sandbox) -> None:
    assert sandbox.run("import os\nif os.fork():\n    os.wait()\n    assert False\n") is Outcome.FAILED


def test_other_files_are_read_only(sandbox: Sandbox, tmp_path: Path) -> None:
    if sandbox.isolation == "limits":
        pytest.skip("the kernel does not permit namespaces here")
    victim = tmp_path / "victim"
    victim.write_text("here")
    victim.chmod(0o666)
    for program in (f"open({str(victim)!r}, 'w')", f"import os\nos.remove({str(victim)!r})"):
        assert sandbox.run(program) is Outcome.FAILED
    assert victim.read_text() == "here"


def test_network_is_out_of_reach(sandbox: Sandbox) -> None:
    if sandbox.isolation == "limits":
        pytest.skip("the kernel does not permit namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\n"
        assert sandbox.run(program) is Outcome.FAILED


def test_program_sees_nothing_of_this_project(sandbox: Sandbox) -> None:
    assert sandbox.run("import quire") is Outcome.FAILED
    assert sandbox.run("import sys\nassert sys.argv == ['solution.py']\n") is Outcome.PASSED


def test_sandbox_in_which_nothing_runs_is_refused() -> None:
    with pytest.raises(EvalMistakeError, match="raise --code-memory"):
        Sandbox.open(cpu_seconds=2, memory_bytes=1 << 16)
