"""Sends answers: whole, or as a stream of server-sent events; and notices when the client has left or does not read.

Nothing is sent before the scheduler's first word, so that a request that it refuses gets an HTTP status of its own.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.reply import Reply
from gateway.shapes import STREAM_END, Shape, encode_json, event

logger = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must pass each event on at once
]


class _ReplyResponse(Response):
    """Owns a reply: whatever happens to the connection, the reply is closed in the end."""

    def __init__(self, reply: Reply, shape: Shape) -> None:
        # Response's own constructor would encode a body, and there is none yet.
        self.status_code = 200
        self.background = None
        self._reply = reply
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves before."""
        try:
            await _run_unless(self._answer(scope, receive, send), self._reasons_to_stop(receive))
        finally:
            self._reply.close()

    def _reasons_to_stop(self, receive: Receive) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines of which each ends when there is nobody to answer any more."""
        return [_until_disconnected(receive)]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(_ReplyResponse):
    """An answer in one JSON object."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self._reply
        deltas_by_choice: list[list[Delta]] = [[] for _ in reply.choices]
        try:
            while not reply.is_finished:
                for delta in await reply.next():
                    deltas_by_choice[delta.choice_idx].append(delta)
            body = self._shape.whole(deltas_by_choice, await reply.wait_for_usage())
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await Response(encode_json(body), media_type="application/json")(scope, receive, send)


class StreamedReply(_ReplyResponse):
    """An answer in server-sent events: one write for each step."""

    def __init__(self, reply: Reply, shape: Shape, stall_s: float) -> None:
        """Take also the time that the client may leave the stream unread."""
        super().__init__(reply, shape)
        self._stall_s = stall_s
        self._write_began_s: float | None = None  # the loop's clock, while a write is under way

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            deltas = await self._reply.next()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send_events(deltas, send)

    async def _send_events(self, deltas: list[Delta], send: Send) -> None:
        reply, shape = self._reply, self._shape
        await self._write(send, b"".join(shape.opening(choice.idx) for choice in reply.choices) + self._encode(deltas))
        try:
            while not reply.is_finished:
                if events := self._encode(await reply.next()):
                    await self._write(send, events)
            last = shape.usage_chunk(await reply.wait_for_usage()) if reply.request.include_usage else b""
        except ApiError as error:
            last = event(error.body())
        await self._write(send, last + STREAM_END, more=False)

    def _encode(self, deltas: list[Delta]) -> bytes:
        return b"".join([self._shape.chunk(delta) for delta in deltas])

    async def _write(self, send: Send, events: bytes, more: bool = True) -> None:
        """Send bytes; waits only when the client has left so much unread that the buffers are full."""
        self._write_began_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": events, "more_body": more})
        self._write_began_s = None

    def _reasons_to_stop(self, receive: Receive) -> list[Coroutine[Any, Any, None]]:
        return [*super()._reasons_to_stop(receive), self._until_stalled()]

    async def _until_stalled(self) -> None:
        # A timer for the whole stream: one for each write would be a fifth of what a token costs.
        clock = asyncio.get_running_loop().time
        while True:
            began_s = self._write_began_s
            patience_s = self._stall_s if began_s is None else began_s + self._stall_s - clock()
            if patience_s <= 0:
                logger.warning("a client has not read its stream for %g s: its request is aborted", self._stall_s)
                return
            await asyncio.sleep(patience_s)


async def _run_unless(answer: Coroutine[Any, Any, None], reasons_to_stop: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run `answer` to its end, or until one of the others has ended."""
    answering = asyncio.create_task(answer)
    tasks = [answering, *map(asyncio.create_task, reasons_to_stop)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
