"""Programs that a model wrote, run where they can do little harm: a process of their own, with limits.

The limits are on CPU time, memory, the size of files, processes and wall time; the folder it works in is temporary.
Where the kernel permits it all other files are read-only, there is no network, no other process can be reached, and
root's programs run as nobody. It keeps careless code from harm; against code that was written to break out, use a
container or a machine of its own.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from quire.eval.errors import EvalMistakeError
from quire.eval.jail import ISOLATIONS

_JAIL = Path(__file__).with_name("jail.py")
_FOLDER_MODE = 0o777  # whoever the program runs as may write there
_STARTUP_SECONDS = 5.0
# At the limit of CPU time the kernel kills; a jail that waits for a child hands the signal on as its exit code.
_OUT_OF_CPU_TIME = {code for signum in (signal.SIGKILL, signal.SIGXCPU) for code in (-signum, 256 - signum)}
_PROBE = "import collections, itertools, math, re, string, typing\nassert sorted([2, 1]) == [1, 2]\n"


class Outcome(Enum):
    """How a program ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where programs run: how long, with how much memory, and how far apart from the machine."""

    cpu_seconds: int
    memory_bytes: int
    isolation: str

    @classmethod
    def open(cls, cpu_seconds: int, memory_bytes: int) -> "Sandbox":
        """Return the strictest sandbox that works here. Raises EvalMistakeError when none does."""
        for isolation in ISOLATIONS if os.geteuid() == 0 else ISOLATIONS[1:]:
            sandbox = cls(cpu_seconds, memory_bytes, isolation)
            if sandbox.run(_PROBE) is Outcome.PASSED:
                return sandbox
        raise EvalMistakeError(
            "--humaneval: no program runs in the sandbox, not even a trivial one: raise --code-memory"
        )

    def run(self, program: str) -> Outcome:
        """Run a Python program; it passes when it comes to its end."""
        word = secrets.token_hex(16)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)  # what the program has left behind may hold the other end
        try:
            with tempfile.TemporaryDirectory(prefix="quire-eval-", ignore_cleanup_errors=True) as folder:
                os.chmod(folder, _FOLDER_MODE)
                exit_code = self._run_jail(program, folder, writing, word)
            if exit_code is None or exit_code in _OUT_OF_CPU_TIME:
                return Outcome.TIMED_OUT
            told = b""
            with contextlib.suppress(BlockingIOError):
                told = os.read(reading, len(word))
            # A child's word alone is not enough: it may go on where its parent has failed.
            return Outcome.PASSED if exit_code == 0 and told == word.encode() else Outcome.FAILED
        finally:
            os.close(reading)
            os.close(writing)

    def _run_jail(self, program: str, folder: str, fd: int, word: str) -> int | None:
        """Run the jail; return its exit code, None where it had to be stopped."""
        limits = (str(self.cpu_seconds), str(self.memory_bytes), self.isolation)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JAIL), *limits, str(fd), word],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            pass_fds=(fd,),
            start_new_session=True,
        )
        try:
            process.communicate(program.encode(), timeout=self.cpu_seconds + _STARTUP_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind
            process.wait()
            if process.stdin:
                process.stdin.close()
        return process.returncode
