"""What the shell refuses a peer with, and the one interceptor that turns it into a gRPC status.

A request that cannot be served is no such error: it ends with a terminal run in its session
(core.types.SchedulerError).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


class ServiceError(Exception):
    """A call is refused or ended; the message tells the peer why."""

    status = grpc.StatusCode.INTERNAL


class RegistrationRefusedError(ServiceError):
    """A worker does not fit this cell, or is not who it says it is."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class WorkerUnreachableError(ServiceError):
    """A worker that registers does not answer at its address; it may try again."""

    status = grpc.StatusCode.UNAVAILABLE


class SessionRefusedError(ServiceError):
    """A session does not open as the protocol asks."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class SessionBrokenError(ServiceError):
    """A session is ended because its gateway is silent, does not read, or has opened a newer one."""

    status = grpc.StatusCode.ABORTED


class ShuttingDownError(ServiceError):
    """A session is ended because the scheduler stops."""

    status = grpc.StatusCode.UNAVAILABLE


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raises ServiceError with the error's status and message."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler with unary and stream-to-stream behaviour wrapped; no other kind raises."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if handler.request_streaming and handler.response_streaming:
            return handler._replace(stream_stream=_mapped(handler.stream_stream))
        if not handler.request_streaming and not handler.response_streaming:
            return handler._replace(unary_unary=_mapped(handler.unary_unary))
        return handler


def _mapped(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def mapped(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except ServiceError as error:
            return await context.abort(error.status, str(error))

    return mapped
