"""One session stream to the scheduler: it writes, reads, shows signs of life and notices when none come back."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from protos import scheduler_pb2, scheduler_pb2_grpc

logger = logging.getLogger(__name__)

SIGN_OF_LIFE_S = 0.5  # the protocol asks for one a second
SILENCE_S = 3.0
_WATCH_INTERVAL_S = 0.25
# A process that was itself stopped for this long does not know what it missed: it judges nobody.
_OWN_STALL_S = 1.0

OnMessage = Callable[[scheduler_pb2.ServerMessage], None]


class Link:
    """One call of Scheduler.Session. `send` never waits; `run` ends when the stream breaks."""

    def __init__(
        self, stub: "scheduler_pb2_grpc.SchedulerAsyncStub", metadata: Sequence[tuple[str, str]], on_message: OnMessage
    ) -> None:
        self._call = stub.Session(metadata=metadata)
        self._outbox: asyncio.Queue[scheduler_pb2.ClientMessage] = asyncio.Queue()
        self._on_message = on_message
        self._last_heard_s = asyncio.get_running_loop().time()
        self.was_heard = False

    def send(self, message: scheduler_pb2.ClientMessage) -> None:
        """Put a message in the queue of those to be written."""
        self._outbox.put_nowait(message)

    async def run(self) -> str:
        """Work until the stream breaks; return why it did."""
        tasks = [asyncio.create_task(job()) for job in (self._read, self._write, self._watch)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _reason(next(task for task in tasks if task in done))
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> str:
        clock = asyncio.get_running_loop().time
        while isinstance(message := await self._call.read(), scheduler_pb2.ServerMessage):
            self._last_heard_s = clock()
            self.was_heard = True
            self._on_message(message)
        return f"it ended the session ({(await self._call.details()) or (await self._call.code()).name})"

    async def _write(self) -> str:
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    message = await self._outbox.get()
            except TimeoutError:
                message = scheduler_pb2.ClientMessage()
            await self._call.write(message)

    async def _watch(self) -> str:
        clock = asyncio.get_running_loop().time
        last_tick_s = clock()
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            now_s = clock()
            if now_s - last_tick_s > _OWN_STALL_S:
                self._last_heard_s = now_s
            last_tick_s = now_s
            if now_s - self._last_heard_s > SILENCE_S:
                return f"it was silent for {SILENCE_S:g} s"


def _reason(task: asyncio.Task[str]) -> str:
    if task.cancelled():
        return "the call was cancelled"
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, asyncio.InvalidStateError):
        return "the stream is closed"
    raise error
