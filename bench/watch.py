"""A cell's figures as they change, read from its Watch stream in a thread beside a load."""

import threading
import time
from collections.abc import Callable
from typing import Self

from bench.cell import Cell
from protos import scheduler_pb2

WATCH_INTERVAL_MS = 20


class Watch:
    """Hands each of a cell's figures, with the time on `time.perf_counter`, to `look`. A context manager."""

    def __init__(self, cell: Cell, look: Callable[[float, scheduler_pb2.CellStats], None]) -> None:
        self._cell = cell
        self._look = look
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and wait for the thread."""
        self._is_over.set()
        self._thread.join()

    def _read(self) -> None:
        request = scheduler_pb2.WatchRequest(interval_ms=WATCH_INTERVAL_MS)
        with self._cell.scheduler() as stub:
            for stats in stub.Watch(request, metadata=self._cell.metadata):
                self._look(time.perf_counter(), stats)
                if self._is_over.is_set():
                    return
