"""The ASGI application: its routes, its error pages, and the session with the scheduler that lives as long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.answering import Gateway
from gateway.errors import ApiError, InternalError, InvalidRequestError, NotFoundError
from gateway.routes.chat import chat_router
from gateway.routes.completions import completions_router
from gateway.routes.keys import needs_key
from gateway.routes.misc import models_router, state_router, tokenizer_router


def create_app(gateway: Gateway) -> FastAPI:
    """Return the application that serves with `gateway`."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        session = asyncio.create_task(gateway.session.run())
        yield
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)

    app = FastAPI(title="Quire", lifespan=lifespan)
    for make_router in (chat_router, completions_router, models_router, tokenizer_router):
        app.include_router(make_router(gateway), dependencies=[Depends(needs_key(gateway))])
    app.include_router(state_router(gateway))
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    return app


async def _answer_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses: an unknown page, or a method that a page does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return NotFoundError(f"There is no page {request.url.path}.").response()
    refused = InvalidRequestError(f"{request.method} {request.url.path}: {error.detail}.")
    response = refused.response()
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    """Answer a client that left before it had sent its whole request; it does not see this."""
    return InvalidRequestError("The request's body is not complete.").response()


async def _answer_bug(_request: Request, _error: Exception) -> Response:
    """Answer when our own code fails; the server logs the traceback."""
    return InternalError("Something failed in the server; its log says more.").response()
