"""The shared prefix index against real servers: what it writes, and what it does when Redis does not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from protos.block_hash import BlockHash
from scheduler_svc.core.types import LaneId
from scheduler_svc.index.redis import LiveInstance, RedisIndex
from scheduler_svc.index.redis_blocks import block_key

from .conftest import until
from .redis_servers import ClusterDeployment, RedisServer, RedisServers, SentinelDeployment, make_certificate
from .shared_indexes import PATIENT, TIMING, A, B, SharedIndexes, chain, native, seen_by, settled


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[RedisServers]:
    servers = RedisServers(tmp_path)
    yield servers
    servers.kill()


@pytest.fixture
def server(servers: RedisServers) -> RedisServer:
    return servers.start()


@pytest.fixture
async def indexes() -> AsyncIterator[SharedIndexes]:
    indexes = SharedIndexes()
    yield indexes
    await indexes.stop()


async def is_published(server: RedisServer, lane_id: LaneId, name: str, num_blocks: int) -> None:
    """Return when the server has these blocks of the instance."""
    keys = [block_key(block_hash) for block_hash in chain(name, num_blocks)]
    await until(lambda: all(server.ask("HEXISTS", key, lane_id) for key in keys))


async def found(index: RedisIndex, hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
    """Return what a look-up finds. After a failover one may fail: each connection learns of it by itself."""
    for _ in range(200):
        if (lengths := await index.lookup(hashes)) is not None:
            return lengths
        await asyncio.sleep(0.05)
    pytest.fail("every look-up failed")


def troubles(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings so far, without the address that they name."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line.partition(": ")[0].partition("index ")[2].partition(" (")[0] for line in lines]


def assert_troubles(caplog: pytest.LogCaptureFixture, *ends: str) -> None:
    lines = troubles(caplog)
    assert len(lines) == len(ends), lines
    assert all(line.endswith(end) for line, end in zip(lines, ends, strict=True)), lines


# ---- what is written


async def test_block_is_one_small_key(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    (block_hash,) = chain("x", 1)
    index.publish(A, native([block_hash]))
    await settled(index)
    assert server.ask("KEYS", "*block*") == [b"quire:1:block:" + block_hash[:16]]
    assert server.ask("HGETALL", block_key(block_hash)) == {b"a": b"0:0"}
    assert 0 < server.ask("PTTL", block_key(block_hash)) <= TIMING.block_ttl_ms


async def test_lookup_is_one_command(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    index.publish(A, native(chain("x", 128)))
    await settled(index)
    before = server.calls("eval")
    assert await index.lookup(chain("x", 128)) == {A: 128}
    assert server.calls("eval") == before + 1


async def test_lookup_stops_at_the_first_block_that_nobody_has(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    index.publish(A, native(chain("x", 3)))
    await settled(index)
    before = server.calls("hkeys")
    assert await index.lookup(chain("x", 128)) == {A: 3}
    assert server.calls("hkeys") == before + 4


async def test_writes_are_batched_and_behind(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    await settled(index)
    before = server.calls("eval")
    for block_hash in chain("x", 1000):
        index.publish(A, native([block_hash]))
    assert index.num_pending_writes == 1000
    assert index.longest_prefix(chain("x", 1000)) == {A: 1000}, "the core need not wait for it"
    await settled(index)
    assert server.calls("eval") == before + 8


async def test_write_is_pending_until_it_is_confirmed(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url, timing=replace(TIMING, answer_ms=200, beat_ms=60_000))
    await settled(index)
    server.pause()
    index.publish(A, native(chain("x", 3)))
    seen = set()

    def is_given_up() -> bool:
        seen.add(index.num_pending_writes)
        return not index.is_up

    await until(is_given_up)
    assert seen == {3}


async def test_keys_that_are_held_are_renewed(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url, timing=replace(TIMING, renew_ms=50))
    index.publish(A, native(chain("x", 1)))
    await is_published(server, A, "x", 1)
    key = block_key(chain("x", 1)[0])
    server.ask("PEXPIRE", key, 60_000)
    await until(lambda: server.ask("PTTL", key) > 60_000)


async def test_live_set_tells_cells_and_loads(server: RedisServer, indexes: SharedIndexes) -> None:
    loads = {A: 3}
    indexes.start(server.url, "cell-1", loads)
    reader = indexes.start(server.url, "cell-2", {B: 0})
    await until(lambda: reader.live == {A: LiveInstance("cell-1", 3), B: LiveInstance("cell-2", 0)})
    loads[A] = 5
    await until(lambda: reader.live[A] == LiveInstance("cell-1", 5))
    del loads[A]
    await until(lambda: set(reader.live) == {B})


async def test_instance_that_comes_during_a_beat_is_live_before_its_blocks_are_written(
    server: RedisServer, indexes: SharedIndexes
) -> None:
    index: RedisIndex

    def come(loads: dict[LaneId, int]) -> None:
        if index.is_up and B not in loads:
            loads[B] = 0
            index.publish(B, native(chain("x", 1)))

    with server.watched() as next_command:
        index = indexes.start(server.url, loads={A: 0}, on_beat=come)
        await until(lambda: B in index.live and not index.num_pending_writes)
        commands = [next_command()]
        while "HSET" not in commands[-1]:
            commands.append(next_command())
    assert any(command.startswith("SET quire:1:live:b") for command in commands)


async def test_dead_instance_is_ignored_then_cleaned(server: RedisServer, indexes: SharedIndexes) -> None:
    mortal = SharedIndexes()
    dying = mortal.start(server.url, "cell-1", {A: 0}, replace(TIMING, live_ttl_ms=500))
    living = indexes.start(server.url, "cell-2", {B: 0})
    hashes = chain("x", 3)
    dying.publish(A, native(hashes))
    living.publish(B, native(hashes[:1]))
    await settled(dying)
    await settled(living)
    assert await seen_by(living, hashes, (A, B)) == {A: 3, B: 1}
    await mortal.stop()
    await until(lambda: A not in living.live)
    assert await living.lookup(hashes) == {B: 1}
    await until(lambda: not server.ask("HEXISTS", block_key(hashes[0]), A))
    assert server.ask("HGETALL", block_key(hashes[0])) == {b"b": b"0:0"}
    await until(lambda: server.ask("SMEMBERS", "quire:1:instances") == {b"b"})
    assert living.counters.stale_hints > 0


async def test_false_claim_of_an_own_instance_is_taken_back(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    index.publish(A, native(chain("x", 1)))
    await settled(index)
    server.ask("HSET", block_key(chain("x", 2)[1]), A, "0:0")
    assert await index.lookup(chain("x", 2)) == {A: 1}
    await until(lambda: not server.ask("EXISTS", block_key(chain("x", 2)[1])))


async def test_waiting_request_learns_what_another_cell_holds(server: RedisServer, indexes: SharedIndexes) -> None:
    here = indexes.start(server.url, "cell-1", {A: 0})
    there = indexes.start(server.url, "cell-2", {B: 0})
    here.publish(A, native(chain("x", 1)))
    there.publish(B, native(chain("x", 3)))
    await settled(there)
    await until(lambda: {A, B} <= set(here.live))
    here.look_elsewhere(lambda: chain("x", 3))
    await until(lambda: here.counters.longer_elsewhere == 1)
    here.publish(A, native(chain("x", 3)))
    here.look_elsewhere(lambda: chain("x", 3))
    await until(lambda: here.counters.lookups == 2)
    assert here.counters.longer_elsewhere == 1


async def test_no_prefix_is_hashed_for_a_cell_that_is_alone(server: RedisServer, indexes: SharedIndexes) -> None:
    index = indexes.start(server.url)
    await settled(index)
    index.look_elsewhere(lambda: pytest.fail("there is nothing to learn"))
    assert index.counters.lookups == 0


async def test_lookup_that_meets_nonsense_is_not_the_last(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    here = indexes.start(server.url, "cell-1", {A: 0})
    there = indexes.start(server.url, "cell-2", {B: 0})
    there.publish(B, native(chain("x", 3)))
    await settled(there)
    server.ask("HSET", block_key(chain("nonsense", 1)[0]), b"\xff", "0:0")
    await until(lambda: B in here.live)
    here.look_elsewhere(lambda: chain("nonsense", 1))
    await until(lambda: here.counters.failed_lookups == 1)
    assert troubles(caplog) == ["went wrong"]

    def is_found() -> bool:
        here.look_elsewhere(lambda: chain("x", 3))  # refused for a moment after the failure
        return here.counters.longer_elsewhere > 0

    await until(is_found)


# ---- what goes wrong


async def test_every_cell_publishes_again_after_a_flush(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    first = indexes.start(server.url, "cell-1", {A: 0})
    second = indexes.start(server.url, "cell-2", {B: 0})
    first.publish(A, native(chain("x", 300)))
    second.publish(B, native(chain("y", 300)))
    await settled(first)
    await settled(second)
    server.ask("FLUSHALL")
    await is_published(server, A, "x", 300)
    await is_published(server, B, "y", 300)
    assert (first.counters.republishes, second.counters.republishes) == (1, 1)
    assert len(troubles(caplog)) == 2


async def test_killed_server_costs_nothing_and_is_filled_again(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    index = indexes.start(server.url)
    index.publish(A, native(chain("x", 300)))
    await settled(index)
    server.kill()
    await until(lambda: not index.is_up)
    index.publish(A, native(chain("y", 10)))
    index.withdraw(A, chain("x", 1))
    assert index.longest_prefix(chain("y", 10)) == {A: 10}
    assert await index.lookup(chain("y", 10)) is None
    assert index.counters.lookups == 0, "nothing is sent"
    server.start()
    await settled(index)
    assert await index.lookup(chain("y", 10)) == {A: 10}
    assert await index.lookup(chain("x", 300)) == {}
    assert await index.lookup(chain("x", 300)[1:]) == {A: 299}
    assert_troubles(caplog, "cannot be reached", "is back")
    assert (index.counters.outages, index.counters.republishes) == (1, 1)


async def test_withdrawals_of_an_outage_reach_a_server_that_forgot_nothing(
    server: RedisServer, indexes: SharedIndexes
) -> None:
    index = indexes.start(server.url, timing=replace(TIMING, answer_ms=200))
    index.publish(A, native(chain("x", 3)))
    await settled(index)
    server.pause()
    await until(lambda: not index.is_up)
    index.withdraw(A, chain("x", 3)[1:])
    server.resume()
    await settled(index)
    assert not server.ask("EXISTS", block_key(chain("x", 3)[2]))


async def test_slow_server_is_asked_once(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    index = indexes.start(
        server.url, timing=replace(TIMING, lookup_ms=20, min_backoff_ms=60_000, max_backoff_ms=60_000)
    )
    await settled(index)
    server.pause()
    assert await index.lookup(chain("x", 1)) is None
    assert await index.lookup(chain("x", 1)) is None
    assert (index.counters.lookups, index.counters.failed_lookups) == (1, 1)
    server.resume()


async def test_server_that_hangs_is_an_outage_until_it_goes_on(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    index = indexes.start(server.url, timing=replace(TIMING, answer_ms=200))
    await settled(index)
    server.pause()
    await until(lambda: not index.is_up)
    index.publish(A, native(chain("x", 2)))
    server.resume()
    await settled(index)
    assert await index.lookup(chain("x", 2)) == {A: 2}
    assert_troubles(caplog, "does not answer in time", "is back")


async def test_full_server_is_an_outage_until_there_is_room(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    index = indexes.start(server.url)
    await settled(index)
    server.ask("CONFIG", "SET", "maxmemory", "1")
    await until(lambda: not index.is_up)
    index.publish(A, native(chain("x", 2)))
    server.ask("CONFIG", "SET", "maxmemory", "0")
    await settled(index)
    assert await index.lookup(chain("x", 2)) == {A: 2}
    assert_troubles(caplog, "is full", "is back")


async def test_read_only_replica_is_an_outage_until_it_is_promoted(
    servers: RedisServers, server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    master = servers.start()
    server.ask("REPLICAOF", "127.0.0.1", str(master.port))
    index = indexes.start(server.url)
    await until(lambda: len(troubles(caplog)) == 1)
    index.publish(A, native(chain("x", 2)))
    server.ask("REPLICAOF", "NO", "ONE")
    await settled(index)
    assert await index.lookup(chain("x", 2)) == {A: 2}
    assert_troubles(caplog, "is a read-only replica", "is back")


async def test_wrong_password_is_told_and_not_shown(
    servers: RedisServers, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers.start("--requirepass", "right", password="right")
    index = indexes.start(f"redis://:wrong-secret@127.0.0.1:{server.port}")
    index.publish(A, native(chain("x", 1)))
    await until(lambda: len(troubles(caplog)) == 1)
    assert not index.is_up
    assert index.longest_prefix(chain("x", 1)) == {A: 1}
    assert_troubles(caplog, "refuses the login")
    assert "wrong-secret" not in caplog.text


async def test_missing_password_is_told(
    servers: RedisServers, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    server = servers.start("--requirepass", "right", password="right")
    indexes.start(server.url)
    await until(lambda: len(troubles(caplog)) == 1)
    assert_troubles(caplog, "refuses the login")


async def test_certificate_of_another_is_not_trusted(
    servers: RedisServers, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    server, _ = servers.start_with_tls()
    another, _ = make_certificate(tmp_path / "another")
    indexes.start(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={another}")
    await until(lambda: len(troubles(caplog)) == 1)
    assert_troubles(caplog, "cannot be reached")
    assert "certificate" in caplog.text.lower()


async def test_server_may_come_later(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    index = indexes.start(server.url)
    index.publish(A, native(chain("x", 2)))
    await until(lambda: len(troubles(caplog)) == 1)
    server.start()
    await settled(index)
    assert await index.lookup(chain("x", 2)) == {A: 2}
    assert_troubles(caplog, "cannot be reached", "is back")


async def test_mistake_of_our_own_ends_nothing(
    server: RedisServer, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    server.ask("SET", "quire:1:instances", "not a set")
    index = indexes.start(server.url)
    await until(lambda: len(troubles(caplog)) == 1)
    server.ask("DEL", "quire:1:instances")
    await settled(index)
    assert_troubles(caplog, "does not do what it is asked", "is back")


async def test_sentinel_names_the_new_master(servers: RedisServers, indexes: SharedIndexes) -> None:
    deployment = SentinelDeployment(servers)
    index = indexes.start(deployment.url, timing=replace(TIMING, max_backoff_ms=200))
    index.publish(A, native(chain("x", 300)))
    await settled(index)
    deployment.master.kill()
    await until(lambda: deployment.replica.ask("ROLE")[0] == b"master", seconds=60)
    await is_published(deployment.replica, A, "x", 300)
    await settled(index)
    assert await found(index, chain("x", 300)) == {A: 300}


async def test_cluster_is_whole_again_when_its_node_is(servers: RedisServers, indexes: SharedIndexes) -> None:
    deployment = ClusterDeployment(servers)
    index = indexes.start(deployment.url, timing=replace(TIMING, max_backoff_ms=200))
    index.publish(A, native(chain("x", 100)))
    await settled(index)
    deployment.nodes[0].kill()
    await until(lambda: not index.is_up)
    deployment.nodes[0].start()
    await asyncio.to_thread(deployment.wait_until_complete)
    await settled(index)
    assert await found(index, chain("x", 100)) == {A: 100}


async def test_cluster_may_come_later(
    servers: RedisServers, indexes: SharedIndexes, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = ClusterDeployment(servers)
    for node in deployment.nodes:
        node.kill()
    index = indexes.start(deployment.url, timing=replace(TIMING, max_backoff_ms=200))
    index.publish(A, native(chain("x", 100)))
    await until(lambda: len(troubles(caplog)) == 1)
    assert_troubles(caplog, "cannot be reached")
    assert "Traceback" not in caplog.text
    for node in deployment.nodes:
        node.start()
    await settled(index)
    assert await found(index, chain("x", 100)) == {A: 100}
    assert troubles(caplog)[-1].endswith("is back")


async def test_stopping_does_not_wait_for_a_server_that_hangs(server: RedisServer) -> None:
    indexes, may_hang, waits = SharedIndexes(), asyncio.Event(), asyncio.Event()

    def hang() -> None:
        if may_hang.is_set():
            server.pause()
            waits.set()

    index = indexes.start(server.url, timing=PATIENT, before_beat=hang)
    await settled(index)
    may_hang.set()
    await waits.wait()
    await asyncio.wait_for(indexes.stop(), 10)
