"""Opens what a RedisAddress names with redis-py, and speaks to all kinds of deployment in one way.

redis-py's own retries are off: whoever calls decides when to try again, and nothing waits longer than it asked to.
"""

import ssl
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisClusterException

from scheduler_svc.index.redis_url import RedisAddress, RedisKind

Command = tuple[bytes | str | int, ...]

# The exceptions that redis-py lets through besides its own RedisError.
TRANSPORT_ERRORS = (OSError, ssl.SSLError, EOFError)


class RedisConnection:
    """A client of one deployment. Nothing is connected before the first command; a broken connection is opened anew."""

    def __init__(self, address: RedisAddress, timeout_ms: int) -> None:
        """`timeout_ms` bounds connecting, and each answer."""
        self.is_cluster = address.kind is RedisKind.CLUSTER
        self._sentinel: Sentinel | None = None
        options = _options(address, timeout_ms)
        self._client: Redis | RedisCluster
        if self.is_cluster:
            nodes = [ClusterNode(host, port) for host, port in address.hosts]
            self._client = RedisCluster(startup_nodes=nodes, **options)
        elif address.kind is RedisKind.SENTINEL:
            sentinel_options = options | {
                "username": address.sentinel_username,
                "password": address.sentinel_password,
            }
            self._sentinel = Sentinel(address.hosts, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
            self._client = self._sentinel.master_for(address.service, db=address.db, **options)
        elif address.path:
            self._client = Redis(unix_socket_path=address.path, db=address.db, **options)
        else:
            host, port = address.hosts[0]
            self._client = Redis(host=host, port=port, db=address.db, **options)

    async def pipelined(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands in one round trip (one for each node, all at once, in a cluster); return their answers.

        Raises redis.RedisError or one of TRANSPORT_ERRORS: the first that any command was answered with.
        """
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers: list[Any] = await pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        except RedisClusterException as error:
            # Not one of its RedisErrors: no node of a cluster answers, or none has the slot of a key.
            raise ConnectionError(str(error)) from error
        return answers

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        if isinstance(self._client, RedisCluster):
            # Once an error has made it look for the nodes anew, it does not close what it had of them.
            await self._client.nodes_manager.aclose()
            await self._client.nodes_manager.aclose("startup_nodes")
        if self._sentinel is not None:
            await self._sentinel.aclose()


def _options(address: RedisAddress, timeout_ms: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_ms / 1000,
        "socket_connect_timeout": timeout_ms / 1000,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # nothing of RESP 3 is used, and servers before 6 do not have it
    }
    if address.is_tls:
        options |= {"ssl": True, "ssl_ca_certs": address.ca_file}
    return options
