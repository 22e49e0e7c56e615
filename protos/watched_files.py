"""Files that may change while a process runs (certificates, API keys): they are read again when they have changed."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Modification time, size and inode: a file that is written in place, and one that another takes the place of.
_State = tuple[int, int, int]


class FileMistakeError(Exception):
    """A file cannot be used as it is; the message is one line that names it."""


def read_file(flag: str, path: Path) -> bytes:
    """Return what is in the file that `flag` names. Raises FileMistakeError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileMistakeError(f"{flag} {path}: {error.strerror or error}") from None


class WatchedFiles(Generic[_T]):
    """What was made of some files when they last made sense. May be used by several threads.

    `read` makes it, and raises FileMistakeError: out of the constructor the first time. Later that is a log line, and
    what was read before stays in force, for a file that is just being replaced makes no sense for a moment.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._states = self._look()
        self._value = read()

    def current(self) -> _T:
        """Return what the files say now."""
        with self._lock:
            states = self._look()
            if states != self._states:
                self._read_again(states)
            return self._value

    def _read_again(self, states: Sequence[_State | None]) -> None:
        shown = ", ".join(map(str, self._paths))
        try:
            value = self._read()
        except FileMistakeError as error:
            logger.error("%s; what was read before stays in force", error)
        else:
            if self._look() != states:
                return  # changed meanwhile: what was read may be of two minds, and the next look reads again
            self._value = value
            logger.info("read again: %s", shown)
        self._states = tuple(states)

    def _look(self) -> tuple[_State | None, ...]:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> _State | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
