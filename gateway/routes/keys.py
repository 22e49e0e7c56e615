"""What stands before every route that costs something: the API key."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from gateway.answering import Gateway
from gateway.errors import InvalidKeyError


def needs_key(gateway: Gateway) -> Callable[[Request], Awaitable[None]]:
    """Return the dependency of routes that are for those with a key: before the body is read it raises InvalidKeyError.

    Without keys in the settings it lets everybody through.
    """

    async def check_key(request: Request) -> None:
        try:
            gateway.tenants.of(request.headers, user="")
        except InvalidKeyError:
            gateway.metrics.refused_keys.inc()
            raise

    return check_key
