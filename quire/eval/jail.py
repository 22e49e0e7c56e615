"""What runs a program in the sandbox: `python -I jail.py SECONDS BYTES ISOLATION FD WORD`, the program on stdin.

It gives up what it can of its rights, sets limits that no child of its own escapes, runs the program, and writes the
word to the file descriptor if that came to its end: leaving early, whatever the exit code, is not passing. It imports
the standard library alone, and is run as a file, so that a program finds nothing of this project.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG = 1
_NOBODY = 65534
_FILE_BYTES = 1 << 20
_NUM_PROCESSES = 64
_NUM_FILES = 64
# From the strictest: another user without network and with no sight of other processes; the same as the caller's user;
# limits alone.
ISOLATIONS = ("user", "namespaces", "limits")


def main(arguments: list[str]) -> int:
    """Run what is on stdin; return the exit code: 0 when it came to its end."""
    seconds, num_bytes, isolation, fd, word = arguments
    program = sys.stdin.read()
    if isolation != "limits":
        _leave_namespaces()
        # The first process of a namespace of processes: with it all that the program starts come to an end.
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if isolation == "user":
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _set_limits(int(seconds), int(num_bytes))
    sys.argv = ["solution.py"]
    try:
        exec(compile(program, "solution.py", "exec"), {"__name__": "__main__"})
    except BaseException:  # SystemExit too
        return 1
    os.write(int(fd), word.encode())
    return 0


def _leave_namespaces() -> None:
    """Go where there is no network and no other process. Raises OSError where the kernel does not permit it."""
    flags = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | (_CLONE_NEWUSER if os.geteuid() else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _set_limits(seconds: int, num_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: num_bytes,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
        resource.RLIMIT_NOFILE: _NUM_FILES,
        resource.RLIMIT_NPROC: _NUM_PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        with contextlib.suppress(ValueError):  # a hard limit that is lower already
            resource.setrlimit(limit, (value, value))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
