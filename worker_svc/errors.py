"""The worker's exceptions, and the interceptor that maps them to gRPC statuses.

WorkerError
├── StartupError            the process cannot start; the message is one line for the person who started it
│   └── OutOfMemoryAtStartError
├── WrongInstanceError      the caller means another process
├── FencedError             the caller is not, or no longer, the scheduler that this worker obeys
├── StepGapError            a step is neither the next one nor one whose result is kept
├── MalformedStepError      a step contradicts what the worker knows; the step fails as a whole
└── DeviceFaultError        the device is gone; the process must end
    └── DeviceHungError     its thread does not come back, and nothing may wait for it
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio


class WorkerError(Exception):
    """Something that the worker refuses or cannot do."""

    status = grpc.StatusCode.INTERNAL


class StartupError(WorkerError):
    """The process cannot start; the message is one line that names what is wrong."""


class OutOfMemoryAtStartError(StartupError):
    """The model's weights or the KV arena do not fit into memory."""

    def __init__(self, what: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        super().__init__(f"{what} needs {needed_bytes:,} bytes, and {free_bytes:,} bytes are free: {advice}")
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes


class WrongInstanceError(WorkerError):
    """The caller means another process: this one was started at an address that it knew."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class FencedError(WorkerError):
    """The lane epoch that the caller names is not the current one."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class StepGapError(WorkerError):
    """A step is neither the next one nor one whose result is kept."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class MalformedStepError(WorkerError):
    """A step contradicts what the worker knows."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class DeviceFaultError(WorkerError):
    """The device can compute nothing more in this process."""


class DeviceHungError(DeviceFaultError):
    """A job does not end. Its thread cannot be stopped, so the process ends without waiting for it."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call that raised a WorkerError with the error's status and message."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Return the method's handler, wrapped. The worker's methods answer with one message or with a stream."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler.stream_stream:
            return handler._replace(stream_stream=_guarded_stream(handler.stream_stream))
        if handler.unary_stream:
            return handler._replace(unary_stream=_guarded_stream(handler.unary_stream))
        return handler._replace(unary_unary=_guarded(handler.unary_unary))


def _guarded(method: Any) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except WorkerError as error:
            return await context.abort(error.status, str(error))

    return call


def _guarded_stream(method: Any) -> Any:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for answer in method(request, context):
                yield answer
        except WorkerError as error:
            await context.abort(error.status, str(error))

    return call
