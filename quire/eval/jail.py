"""What runs a program in the sandbox: `python -I -S jail.py SECONDS BYTES ISOLATION FD WORD`, the program on stdin.

It gives up what it can of its rights, sets limits that no child of its own escapes, runs the program in the folder that
it was started in, and writes the word to the file descriptor if that came to its end: leaving early, whatever the exit
code, is not passing. It imports the standard library alone, and a program finds nothing else.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys

# From the strictest: another user's process in namespaces of its own; the same as the caller's user; limits alone.
ISOLATIONS = ("user", "namespaces", "limits")

_NOBODY = 65534
_FILE_BYTES = 1 << 20
_NUM_PROCESSES = 64
_NUM_FILES = 64

# The kernel's own numbers, for what Python has no names for (linux/sched.h, mount.h, prctl.h, capability.h).
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAPABILITY_VERSION_3, _CAP_DAC_READ_SEARCH = 0x20080522, 2

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run what is on stdin; return the exit code: 0 when it came to its end."""
    seconds, num_bytes, isolation, fd, word = arguments
    program = sys.stdin.read()
    if isolation != "limits":
        _leave_namespaces()
        _make_read_only_but(os.getcwd())
        # The first process of a namespace of processes: with it all that the program starts come to an end.
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        _give_up_rights(isolation)
    _set_limits(int(seconds), int(num_bytes))
    sys.argv = ["solution.py"]
    try:
        exec(compile(program, "solution.py", "exec"), {"__name__": "__main__"})
    except BaseException:  # SystemExit too
        return 1
    os.write(int(fd), word.encode())
    return 0


def _check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), call)


def _leave_namespaces() -> None:
    """Go where there is no network, no other process and no mount of others. Raises OSError where that is forbidden."""
    flags = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    _check(_libc.unshare(flags | (_CLONE_NEWUSER if os.geteuid() else 0)), "unshare")


def _make_read_only_but(folder: str) -> None:
    """Make all files read-only but those in a folder. Raises OSError where the kernel cannot (Linux before 5.12)."""
    path = folder.encode()
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
    _check(_libc.mount(path, path, None, _MS_BIND, None), "mount")
    _set_mount(b"/", _AT_RECURSIVE, set_flags=_MOUNT_ATTR_RDONLY)
    _set_mount(path, 0, clear_flags=_MOUNT_ATTR_RDONLY)
    os.chdir(folder)  # the working directory was on the mount below


def _set_mount(path: bytes, recursion: int, set_flags: int = 0, clear_flags: int = 0) -> None:
    attributes = struct.pack("QQQQ", set_flags, clear_flags, 0, 0)
    call = _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, recursion, attributes, ctypes.c_size_t(len(attributes)))
    _check(call, "mount_setattr")


def _give_up_rights(isolation: str) -> None:
    """Keep no capability and no way to one; another user keeps that to read, since the libraries may be root's."""
    capabilities = 0
    if isolation == "user":
        _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        capabilities = 1 << _CAP_DAC_READ_SEARCH
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("6I", capabilities, capabilities, 0, 0, 0, 0)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


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
