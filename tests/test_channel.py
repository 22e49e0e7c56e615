"""What every service's channel does with errors."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.channel import ErrorInterceptor, Refusals, StatusError


class TeapotError(StatusError):
    status = grpc.StatusCode.FAILED_PRECONDITION


async def refuse(_request: Any, _context: Any) -> bytes:
    raise TeapotError("no coffee")


async def refuse_while_streaming(_request: Any, _context: Any) -> AsyncIterator[bytes]:
    yield b"tea"
    raise TeapotError("no coffee")


HANDLERS: dict[str, Any] = {
    "unary": grpc.unary_unary_rpc_method_handler(refuse),
    "stream of requests": grpc.stream_unary_rpc_method_handler(refuse),
    "generator": grpc.unary_stream_rpc_method_handler(refuse_while_streaming),
    "writer": grpc.unary_stream_rpc_method_handler(refuse),
    "generator, both streams": grpc.stream_stream_rpc_method_handler(refuse_while_streaming),
    "writer, both streams": grpc.stream_stream_rpc_method_handler(refuse),
}


async def call_method(channel: grpc.aio.Channel, name: str) -> None:
    """Call a method and take all that it answers."""
    handler = HANDLERS[name]
    makers: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): channel.unary_unary,
        (True, False): channel.stream_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    call = makers[handler.request_streaming, handler.response_streaming](f"/test/{name}")
    answer = call(iter([b""])) if handler.request_streaming else call(b"")
    if not handler.response_streaming:
        await answer
        return
    async for _ in answer:
        pass


@pytest.mark.parametrize("name", sorted(HANDLERS))
async def test_error_of_a_method_of_any_kind_becomes_its_status(name: str) -> None:
    server = grpc.aio.server(interceptors=(ErrorInterceptor(Refusals()),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_method(channel, name)
    await server.stop(None)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "no coffee")
