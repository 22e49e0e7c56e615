"""Asks a service of this machine whether it answers, for the health check of its container."""

import sys
from collections.abc import Callable

import grpc

from protos.credentials import Credentials, CredentialSettings
from protos.watched_files import FileMistakeError

TIMEOUT_S = 4.0
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}


def probe(host: str, port: int, settings: CredentialSettings, call: Callable[..., object]) -> int:
    """Return 0 when the service that listens on `host` and `port` answers, else 1 with one line on standard error.

    `call(channel, metadata=..., timeout=...)` makes one call; what it returns does not matter.
    """
    address = f"{_WILDCARD_HOSTS.get(host, host)}:{port}"
    try:
        credentials = Credentials.of_client(settings)
    except FileMistakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with credentials.dial_blocking(address) as channel:
        try:
            call(channel, metadata=credentials.metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            reason = (
                f"{error.code()}, {credentials.explain(error.details())}" if isinstance(error, grpc.Call) else error
            )
            print(f"no answer from {address}: {reason}", file=sys.stderr)
            return 1
    return 0
