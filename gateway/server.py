"""The HTTP server: it listens before it says that it is ready, and drains before it stops.

The first SIGTERM or SIGINT lets running answers finish while new requests get 503; a second one ends at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.answering import Gateway
from gateway.app import create_app
from gateway.errors import StartupError

logger = logging.getLogger("gateway")

_BACKLOG = 2048
_LAST_WORDS_S = 2  # that connections get to close when answers are cut
_MAX_HEAD_BYTES = 64 * 1024  # of a request, before its body


class BoundedHead(HttpToolsProtocol):
    """uvicorn's protocol, which by itself reads a request line or header without end, from anybody."""

    _reads_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take what came. A head that has not ended after so many bytes is an error of the client's."""
        began_before = self._reads_head
        super().data_received(data)
        if self._reads_head and began_before:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's head is too long.")

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._reads_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Count no more."""
        self._reads_head = False
        super().on_headers_complete()


class Server(uvicorn.Server):
    """A uvicorn server for one gateway that leaves signals alone."""

    def __init__(self, gateway: Gateway) -> None:
        config = uvicorn.Config(
            create_app(gateway),
            http=BoundedHead,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and let others know."""
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: the gateway drains before it stops listening."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(gateway: Gateway, listener: socket.socket) -> None:
    """Serve until a signal has come and running answers have finished."""
    server = Server(gateway)
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            server.force_exit = server.should_exit = True
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve([listener]))
    await server.is_listening.wait()
    logger.info("ready on %s", url_of(listener))
    await stop.wait()
    logger.info("draining: running answers finish, new requests get 503")
    settings, clock = gateway.settings, asyncio.get_running_loop().time
    patience_s, begin_s = settings.gateway_drain_seconds, clock()
    draining = asyncio.create_task(gateway.admission.drain(patience_s))
    await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
    if draining.done() and draining.result():
        # The last of the answers may still wait in their connections for clients that read slowly.
        left_s = min(patience_s - (clock() - begin_s), settings.client_stall_seconds)
        server.config.timeout_graceful_shutdown = max(_LAST_WORDS_S, int(left_s))
    elif draining.done():
        logger.warning("answers are cut: they did not finish in %g s", patience_s)
    server.should_exit = True
    await serving
