"""What every prefix index does: the one in memory, a cell's own view of the shared one, and another cell's view of it.

The last is asked through every kind of Redis.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from protos.block_hash import BlockHash
from scheduler_svc.core.types import LaneId, PrefixIndex
from scheduler_svc.index.memory import MemoryIndex

from .redis_servers import ClusterDeployment, RedisServer, RedisServers, SentinelDeployment
from .shared_indexes import A, B, C, SharedIndexes, chain, native, seen_by, settled

DEPLOYMENTS = ("plain", "password", "socket", "tls", "sentinel", "cluster")
PASSWORD = "p@ss/word"


class Deployments:
    """A deployment of each kind, started when it is first asked for."""

    def __init__(self, servers: RedisServers) -> None:
        self._servers = servers
        self._started: dict[str, tuple[str, list[RedisServer]]] = {}

    def url(self, kind: str) -> str:
        """Return the URL of a deployment that holds nothing."""
        if kind not in self._started:
            self._started[kind] = self._start(kind)
        url, masters = self._started[kind]
        for server in masters:
            server.ask("FLUSHALL")
        return url

    def _start(self, kind: str) -> tuple[str, list[RedisServer]]:
        """Return the URL of a new deployment, and the servers that hold its keys."""
        if kind == "sentinel":
            sentinel = SentinelDeployment(self._servers)
            return sentinel.url, [sentinel.master]
        if kind == "cluster":
            cluster = ClusterDeployment(self._servers)
            return cluster.url, cluster.nodes
        if kind == "tls":
            server, certificate = self._servers.start_with_tls()
            return f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificate}", [server]
        if kind == "password":
            server = self._servers.start("--requirepass", PASSWORD, password=PASSWORD)
            return f"redis://:p%40ss%2Fword@127.0.0.1:{server.port}/3", [server]
        server = self._servers.start()
        return (f"unix://{server.socket_path}" if kind == "socket" else server.url), [server]


@dataclass
class Subject:
    """An index that is spoken to as the core does, and how to ask what it knows."""

    index: PrefixIndex
    lengths: Callable[[Sequence[BlockHash]], Awaitable[dict[LaneId, int]]]


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployments]:
    servers = RedisServers(tmp_path_factory.mktemp("redis"))
    yield Deployments(servers)
    servers.kill()


@pytest.fixture(params=["memory", "own", *DEPLOYMENTS])
async def subject(request: pytest.FixtureRequest, deployments: Deployments) -> AsyncIterator[Subject]:
    if request.param == "memory":
        memory = MemoryIndex()

        async def lengths_in_memory(hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
            return memory.longest_prefix(hashes)

        yield Subject(memory, lengths_in_memory)
        return
    url = deployments.url("plain" if request.param == "own" else request.param)
    indexes = SharedIndexes()
    writer = indexes.start(url, "writer", {A: 0, B: 0, C: 0})
    reader = indexes.start(url, "reader", {})

    async def own_lengths(hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        return writer.longest_prefix(hashes)

    async def others_lengths(hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        await settled(writer)
        return await seen_by(reader, hashes, (A, B, C))

    yield Subject(writer, own_lengths if request.param == "own" else others_lengths)
    await indexes.stop()


async def test_empty_index_knows_nothing(subject: Subject) -> None:
    assert await subject.lengths(chain("x", 3)) == {}


async def test_no_hashes_have_no_holder(subject: Subject) -> None:
    subject.index.publish(A, native(chain("x", 3)))
    assert await subject.lengths([]) == {}


async def test_each_lane_has_its_own_length(subject: Subject) -> None:
    hashes = chain("x", 4)
    subject.index.publish(A, native(hashes[:1]))
    subject.index.publish(B, native(hashes[:3]))
    subject.index.publish(C, native(hashes))
    assert await subject.lengths(hashes) == {A: 1, B: 3, C: 4}
    assert await subject.lengths(hashes[:2]) == {A: 1, B: 2, C: 2}


async def test_prefix_ends_at_the_first_block_that_is_missing(subject: Subject) -> None:
    hashes = chain("x", 4)
    subject.index.publish(A, native([hashes[0], hashes[1], hashes[3]]))
    assert await subject.lengths(hashes) == {A: 2}


async def test_lane_without_the_first_block_is_not_named(subject: Subject) -> None:
    hashes = chain("x", 3)
    subject.index.publish(A, native(hashes[1:]))
    subject.index.publish(B, native(hashes))
    assert await subject.lengths(hashes) == {B: 3}


async def test_publishing_again_changes_nothing(subject: Subject) -> None:
    hashes = chain("x", 2)
    subject.index.publish(A, native(hashes))
    subject.index.publish(A, native(hashes))
    subject.index.withdraw(A, hashes[1:])
    assert await subject.lengths(hashes) == {A: 1}


async def test_withdrawn_blocks_are_gone_from_that_lane_alone(subject: Subject) -> None:
    hashes = chain("x", 3)
    subject.index.publish(A, native(hashes))
    subject.index.publish(B, native(hashes))
    assert await subject.lengths(hashes) == {A: 3, B: 3}
    subject.index.withdraw(A, hashes[1:])
    assert await subject.lengths(hashes) == {A: 1, B: 3}


async def test_withdrawing_the_unknown_is_ignored(subject: Subject) -> None:
    hashes = chain("x", 2)
    subject.index.withdraw(A, hashes)
    subject.index.publish(A, native(hashes))
    subject.index.withdraw(A, chain("y", 1))
    subject.index.withdraw(B, hashes)
    assert await subject.lengths(hashes) == {A: 2}


async def test_dropped_lane_is_forgotten_and_may_come_back(subject: Subject) -> None:
    hashes = chain("x", 2)
    subject.index.publish(A, native(hashes))
    subject.index.publish(B, native(hashes))
    subject.index.drop_lane(A)
    subject.index.drop_lane(A)
    assert await subject.lengths(hashes) == {B: 2}
    subject.index.publish(A, native(hashes[:1]))
    assert await subject.lengths(hashes) == {A: 1, B: 2}


async def test_two_chains_do_not_mix(subject: Subject) -> None:
    subject.index.publish(A, native(chain("x", 2)))
    subject.index.publish(A, native(chain("y", 2)))
    assert await subject.lengths([chain("x", 1)[0], *chain("y", 2)]) == {A: 3}
    assert await subject.lengths(chain("z", 2)) == {}


async def test_long_prefixes_are_found_whole(subject: Subject) -> None:
    hashes = chain("x", 500)
    subject.index.publish(A, native(hashes))
    subject.index.publish(B, native(hashes[:300]))
    assert await subject.lengths(hashes) == {A: 500, B: 300}


def test_nothing_is_kept_in_memory_of_what_is_gone() -> None:
    index = MemoryIndex()
    index.publish(A, native(chain("x", 3)))
    index.publish(B, native(chain("x", 3)))
    index.withdraw(A, chain("x", 3))
    index.drop_lane(A)
    index.drop_lane(B)
    assert vars(index) == vars(MemoryIndex())
