"""Writing tokens into native blocks; copying and clearing blocks of every format."""

from typing import Any

import numpy as np

from kernels.cpu.places import (
    FINE,
    block_offset,
    check_block,
    check_entry,
    entry_offset,
    format_at,
    format_of_entry,
)
from kernels.cpu.rows import activation_bytes, read
from kernels.cpu.runtime import compiled, compiled_short, inlined
from kernels.cpu.vector import (
    FLOAT32,
    LANES,
    fetch_and_add,
    item_bytes,
    load,
    load_int32,
    load_int64,
    load_scalar,
    offset_of,
    record_at,
    scatter,
    splat,
    store,
)

CHUNK_TOKENS = 16  # that a thread takes at once

WRITE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "key", "value", "slots", "arena",  # addresses
            "key_stride", "key_head_stride", "value_stride", "value_head_stride",  # bytes
            "dtype_code", "num_tokens", "num_heads", "head_size",
            "block_size", "slab_bytes", "block_bytes", "arena_bytes",
            "next_token", "bad_slot", "status",
        )
    ],
    align=True,
)  # fmt: skip
job_at = record_at(WRITE)
NEXT_TOKEN = offset_of(WRITE, "next_token")

_VECTOR_BYTES = 4 * LANES


@compiled_short
def fill_write(
    address: int, key: int, value: int, slots: int, arena: int,
    key_stride: int, key_head_stride: int, value_stride: int, value_head_stride: int,
    dtype_code: int, num_tokens: int, arena_bytes: int,
) -> None:  # fmt: skip
    """Fill in the WRITE record at an address. What a model has in common for all launches is there already."""
    job = job_at(address)
    job.key, job.value, job.slots, job.arena, job.arena_bytes = key, value, slots, arena, arena_bytes
    job.key_stride, job.key_head_stride = key_stride, key_head_stride
    job.value_stride, job.value_head_stride = value_stride, value_head_stride
    job.dtype_code, job.num_tokens, job.next_token, job.status = dtype_code, num_tokens, 0, FINE


def write_chunks(address: int, tag: Any) -> None:
    """Take chunks of the tokens of the WRITE record at an address until none is left."""
    job = job_at(address)
    while True:
        begin = fetch_and_add(address + NEXT_TOKEN, CHUNK_TOKENS)
        if begin >= job.num_tokens:
            break
        for token in range(begin, min(begin + CHUNK_TOKENS, job.num_tokens)):
            slot = load_int64(job.slots, token)
            block_id = slot // job.block_size
            status = check_block(block_id, job.slab_bytes, job.block_bytes, job.arena_bytes)
            if status != FINE:
                job.bad_slot, job.status = slot, status
                return
            block = job.arena + block_offset(block_id, job.slab_bytes, job.block_bytes)
            _write_token(address, token, block, slot % job.block_size, tag)


@inlined
def _write_token(address: int, token: int, block: int, place: int, tag: Any) -> None:
    """Write one token's keys, a column of the block's channel-major plane, and its values, a row."""
    job = job_at(address)
    item, read_item = item_bytes(tag), activation_bytes(job.dtype_code)
    plane = job.block_size * job.head_size * item
    for h in range(job.num_heads):
        key = job.key + token * job.key_stride + h * job.key_head_stride
        value = job.value + token * job.value_stride + h * job.value_head_stride
        column, row = (
            block + h * plane + place * item,
            block + (job.num_heads + h) * plane + place * job.head_size * item,
        )
        for d in range(0, job.head_size, LANES):
            step = job.block_size * item
            scatter(column + d * step, step, read(key + d * read_item, job.dtype_code), tag)
            store(row + d * item, read(value + d * read_item, job.dtype_code), tag)


@compiled_short
def check_entries(entries: int, num_entries: int, formats: int, slab_bytes: int, arena_bytes: int) -> tuple[int, int]:
    """Return how the int32 entries at an address are (see `places`), and the first at fault."""
    for i in range(num_entries):
        entry = load_int32(entries, i)
        status = check_entry(entry, formats, slab_bytes, arena_bytes)
        if status != FINE:
            return status, entry
    return FINE, 0


@inlined
def copy_bytes(source: int, target: int, num_bytes: int) -> None:
    """Copy a multiple of 4 bytes."""
    vectors_end = num_bytes // _VECTOR_BYTES * _VECTOR_BYTES
    for j in range(0, vectors_end, _VECTOR_BYTES):
        store(target + j, load(source + j, FLOAT32), FLOAT32)
    for j in range(vectors_end, num_bytes, 4):
        store(target + j, load_scalar(source + j, FLOAT32), FLOAT32)


@compiled
def copy_entries(
    arena: int, num_layers: int, sources: int, targets: int, num_entries: int, formats: int, slab_bytes: int,
    arena_bytes: int,
) -> None:  # fmt: skip
    """Copy blocks in every layer of the arena at an address; entries have been checked, and are of like formats."""
    for layer_arena in range(arena, arena + num_layers * arena_bytes, arena_bytes):
        for i in range(num_entries):
            entry = load_int32(sources, i)
            source = layer_arena + entry_offset(entry, formats, slab_bytes)
            target = layer_arena + entry_offset(load_int32(targets, i), formats, slab_bytes)
            copy_bytes(source, target, format_at(format_of_entry(formats, entry)).block_bytes)


@compiled
def zero_entries(
    arena: int, num_layers: int, entries: int, num_entries: int, formats: int, slab_bytes: int, arena_bytes: int
) -> None:
    """Fill blocks in every layer of the arena at an address with zeros; entries have been checked."""
    zeros = splat(np.float32(0))
    for layer_arena in range(arena, arena + num_layers * arena_bytes, arena_bytes):
        for i in range(num_entries):
            entry = load_int32(entries, i)
            block = layer_arena + entry_offset(entry, formats, slab_bytes)
            end = block + format_at(format_of_entry(formats, entry)).block_bytes
            vectors_end = end - (end - block) % _VECTOR_BYTES
            for j in range(block, vectors_end, _VECTOR_BYTES):
                store(j, zeros, FLOAT32)
            for j in range(vectors_end, end, 4):
                store(j, np.float32(0), FLOAT32)
