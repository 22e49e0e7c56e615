"""What is written of blocks in Redis, and read: the keys, and the commands for many blocks in one round trip.

    quire:1:block:<16 bytes of the hash>   hash: instance -> "format:recipe"    TTL renewed by each write

128 bits of the hash are enough, as what is read is a hint. A place is never written: places change with every move.

On one server a script does a whole batch: building and parsing commands one by one costs this process 14 us for each
block of a look-up and 34 us for each of a write, with a script it is 2 us, and a look-up ends at the first block that
nobody has. In a cluster the keys lie on different nodes, where no script may touch them together, so it is a pipeline.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Protocol

from protos.block_hash import BlockHash
from scheduler_svc.core.types import Encoding, LaneId
from scheduler_svc.index.pending import Write
from scheduler_svc.index.redis_client import Command, RedisConnection

KEY_PREFIX = b"quire:1:"  # with the version of what the keys mean
_KEY_HASH_BYTES = 16

_WRITE_SCRIPT = """
for i, key in ipairs(KEYS) do
    local instance, held = ARGV[2 * i], ARGV[2 * i + 1]
    if held == '' then
        redis.call('HDEL', key, instance)
    else
        redis.call('HSET', key, instance, held)
        redis.call('PEXPIRE', key, ARGV[1])
    end
end
"""
_READ_SCRIPT = """
local holders = {}
for i, key in ipairs(KEYS) do
    holders[i] = redis.call('HKEYS', key)
    if #holders[i] == 0 then break end
end
return holders
"""


class BlockKeys(Protocol):
    """Writes and reads blocks; both raise what RedisConnection.pipelined raises."""

    max_writes: int  # of a batch that holds the event loop for about half a millisecond

    async def write(self, writes: Sequence[Write]) -> None:
        """Say of each block how the instance holds it, or that it does not."""

    async def read(self, block_hashes: Sequence[BlockHash]) -> list[list[bytes]]:
        """Return the instances of each block. What follows the first block without any may be left out."""


def prefix_lengths(holders_of_blocks: Iterable[AbstractSet[LaneId]]) -> dict[LaneId, int]:
    """Return how many blocks each lane holds from the first on, given the holders of each block, in order."""
    lengths: dict[LaneId, int] = {}
    holding: set[LaneId] | None = None
    num_blocks = 0
    for num_held, holders in enumerate(holders_of_blocks):
        if holding is None:
            holding = set(holders)
        lengths.update((lane_id, num_held) for lane_id in holding - holders)
        holding &= holders
        num_blocks = num_held + 1
        if not holding:
            return lengths
    lengths.update((lane_id, num_blocks) for lane_id in holding or ())
    return lengths


def block_keys(connection: RedisConnection, ttl_ms: int) -> BlockKeys:
    """Return what suits the deployment; a block that is not written again within `ttl_ms` is forgotten."""
    return _PipelinedKeys(connection, ttl_ms) if connection.is_cluster else _ScriptedKeys(connection, ttl_ms)


def block_key(block_hash: BlockHash) -> bytes:
    """Return the key of a block."""
    return KEY_PREFIX + b"block:" + block_hash[:_KEY_HASH_BYTES]


@cache
def _said_of(held: Encoding) -> bytes:
    return b"%d:%d" % held


class _ScriptedKeys:
    max_writes = 128

    def __init__(self, connection: RedisConnection, ttl_ms: int) -> None:
        self._connection = connection
        self._ttl_ms = ttl_ms

    async def write(self, writes: Sequence[Write]) -> None:
        keys = [block_key(write.block_hash) for write in writes]
        said = [part for write in writes for part in (write.lane_id, _said_of(write.held) if write.held else b"")]
        await self._connection.pipelined([("EVAL", _WRITE_SCRIPT, len(keys), *keys, self._ttl_ms, *said)])

    async def read(self, block_hashes: Sequence[BlockHash]) -> list[list[bytes]]:
        keys = [block_key(block_hash) for block_hash in block_hashes]
        holders: list[list[bytes]]
        (holders,) = await self._connection.pipelined([("EVAL", _READ_SCRIPT, len(keys), *keys)])
        return holders


class _PipelinedKeys:
    max_writes = 16

    def __init__(self, connection: RedisConnection, ttl_ms: int) -> None:
        self._connection = connection
        self._ttl_ms = ttl_ms

    async def write(self, writes: Sequence[Write]) -> None:
        commands: list[Command] = []
        for write in writes:
            key = block_key(write.block_hash)
            if write.held:
                commands += (("HSET", key, write.lane_id, _said_of(write.held)), ("PEXPIRE", key, self._ttl_ms))
            else:
                commands.append(("HDEL", key, write.lane_id))
        await self._connection.pipelined(commands)

    async def read(self, block_hashes: Sequence[BlockHash]) -> list[list[bytes]]:
        return await self._connection.pipelined([("HKEYS", block_key(block_hash)) for block_hash in block_hashes])
