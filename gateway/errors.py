"""What clients are told when something is wrong: one exception tree, and OpenAI's JSON for it.

ApiError                     an HTTP status and OpenAI's `type`, `param` and `code`
├── InvalidRequestError      400: the request is wrong; `param` names the parameter
│   └── UnsupportedError     400: the parameter is known, and this server cannot do it
├── InvalidKeyError          401: no API key, or none that is known
├── NotFoundError            404: no such model
├── OverloadedError          429: the queue is full
├── UnavailableError         503: draining, or no worker
├── DeadlineError            504: the request's own time is over
└── InternalError            500: our fault

StartupError                 the gateway cannot start; its message is one line for the person who started it
"""

from typing import Any

from fastapi.responses import JSONResponse

from protos import common_pb2

RETRY_AFTER_S = 1


class StartupError(Exception):
    """The gateway cannot start as it was told to."""


class ApiError(Exception):
    """A request that ends with an error; becomes OpenAI's error object."""

    status = 500
    type = "internal_server_error"
    code: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param = message, param

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else None
        return JSONResponse(self.body(), self.status, headers)


class InvalidRequestError(ApiError):
    """The request can never be served as it is."""

    status = 400
    type = "invalid_request_error"


class UnsupportedError(InvalidRequestError):
    """The request asks for something that this server does not do."""

    code = "unsupported_parameter"

    def __init__(self, param: str, what: str | None = None) -> None:
        super().__init__(f"{what or f'`{param}`'} is not supported by this server.", param)


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit."""

    code = "context_length_exceeded"


class InvalidKeyError(ApiError):
    """The request carries no API key, or none that this server knows."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotFoundError(ApiError):
    """There is no such model, or no such page."""

    status = 404
    type = "invalid_request_error"


class UnknownModelError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist.", "model")


class OverloadedError(ApiError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = RETRY_AFTER_S


class UnavailableError(ApiError):
    """Nobody can serve the request now."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"
    retry_after_s = RETRY_AFTER_S


class DeadlineError(ApiError):
    """The request's own time is over."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class InternalError(ApiError):
    """Something failed that is not the client's fault."""

    code = "internal_error"


_ERRORS_BY_CODE: dict[int, type[ApiError]] = {
    common_pb2.ERROR_CODE_INVALID_ARGUMENT: InvalidRequestError,
    common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED: OverloadedError,
    common_pb2.ERROR_CODE_UNAVAILABLE: UnavailableError,
    common_pb2.ERROR_CODE_DEADLINE_EXCEEDED: DeadlineError,
}


def from_wire(error: common_pb2.Error) -> ApiError:
    """Return the error that the scheduler ended a sequence with."""
    error_class = _ERRORS_BY_CODE.get(error.code, InternalError)
    return error_class(error.message or "The request failed.", error.param or None)
