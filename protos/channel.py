"""What both ends of a gRPC channel must agree on: protocol version, message size, the cluster token, errors.

Every call between services carries the cluster token as metadata. A server that knows a token refuses calls without it;
a server without one may only listen on loopback (`require_token_beyond_loopback`).

A method that raises StatusError ends its call with that error's status: services derive their errors from it. What is
refused, without the token or because such an error says so, is counted by reason (`Refusals`).
"""

import hmac
import inspect
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import grpc
import grpc.aio

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
TOKEN_METADATA_KEY = "quire-cluster-token"

# gRPC's keepalive pings stay off (frequent ones are answered with GOAWAY): the streams carry their own signs of life.
CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# Without the last a second server could listen on the same port, and each would get some of the calls.
SERVER_OPTIONS: Sequence[tuple[str, Any]] = (*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0))


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a client sends with every call; empty without a token."""
    return ((TOKEN_METADATA_KEY, token),) if token else ()


def is_loopback(host: str) -> bool:
    """Return whether a server on `host` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class MissingTokenError(Exception):
    """A service would listen beyond loopback without a cluster token."""


def require_token_beyond_loopback(host: str, token: str) -> None:
    """Raise MissingTokenError when a service on `host` would accept calls from anybody."""
    if not token and not is_loopback(host):
        raise MissingTokenError(
            f"--host {host} listens beyond this machine: set a cluster token (--cluster-token or QUIRE_CLUSTER_TOKEN)"
        )


class Refusal(StrEnum):
    """Why a call is refused, as it is counted."""

    TOKEN = "token"  # the cluster token is missing or wrong
    UNFIT_REGISTER = "unfit_register"  # a worker that does not fit the cell, or is not who it says it is
    REPLAYED_REGISTER = "replayed_register"  # a lane epoch that is not newer than the one known
    REPLAYED_SESSION = "replayed_session"  # a session number that is not newer than the one known
    WRONG_INSTANCE = "wrong_instance"  # another worker process is meant
    FENCED_STEPS = "fenced_steps"  # steps, or a manifest, of a lane epoch that is not the current one
    STEP_GAP = "step_gap"  # a step that is neither the next one nor kept


class Refusals:
    """How many calls a process has refused, by reason."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter({reason.value: 0 for reason in Refusal})

    @property
    def totals(self) -> Mapping[str, int]:
        """Calls by reason, with those that have not occurred."""
        return self._totals

    def count(self, reason: Refusal) -> None:
        """Count one call."""
        self._totals[reason.value] += 1

    def add(self, totals: Mapping[str, int]) -> None:
        """Count what another process has refused; a reason that only it knows is counted too."""
        self._totals.update(totals)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that do not carry the cluster token (UNAUTHENTICATED), and counts them."""

    def __init__(self, token: str, refusals: Refusals) -> None:
        self._token = token.encode()
        self._refusals = refusals

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's own handler, or one of the same kind that refuses."""
        handler = await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_METADATA_KEY, "")
        if handler is None or not self._token or hmac.compare_digest(sent.encode(), self._token):
            return handler
        self._refusals.count(Refusal.TOKEN)
        make_handler = _HANDLER_MAKERS[handler.request_streaming, handler.response_streaming]
        return make_handler(_refuse)


async def _refuse(_request: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")


# By (request is a stream, response is a stream).
_HANDLER_MAKERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class StatusError(Exception):
    """Ends the call in which it is raised, with its class's status; the message tells the peer why."""

    status = grpc.StatusCode.INTERNAL
    refusal: Refusal | None = None  # the reason that the call counts as refused for; None: it does not


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raises StatusError with the error's status and message, and counts it where it is a refusal."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler, its behaviour wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        streaming = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if is_stream else "unary" for is_stream in streaming)
        behaviour = getattr(handler, kind)
        # A method that answers with a stream either yields messages or writes them through its context.
        guard = _guarded_generator if inspect.isasyncgenfunction(behaviour) else _guarded
        return handler._replace(**{kind: guard(behaviour, self._refusals)})


def _guarded(behaviour: Any, refusals: Refusals) -> Any:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except StatusError as error:
            return await _end(context, error, refusals)

    return guarded


def _guarded_generator(behaviour: Any, refusals: Refusals) -> Any:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in behaviour(request, context):
                yield answer
        except StatusError as error:
            await _end(context, error, refusals)

    return guarded


async def _end(context: Any, error: StatusError, refusals: Refusals) -> None:
    if error.refusal is not None:
        refusals.count(error.refusal)
    await context.abort(error.status, str(error))
