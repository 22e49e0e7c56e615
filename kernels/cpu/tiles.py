"""Queries of a unit against one tile of 64 keys: scores, probabilities, and their sum over the values.

A unit's queries are rows of a product: all (head, query token, query head of the group) of the unit, in that order. A
single token is multiplied by the blocks where they lie; more tokens have rows enough to pay for float32 copies:

    keys    panels of 16 tokens, each [head_size][16]        values    panels of 16 channels, each [64][16]

Both give the same bits (see `product`), so how a token was scheduled does not show in its result.
"""

from typing import Any, cast

import numpy as np

from kernels.cpu.places import FINE, check_entry, entry_offset
from kernels.cpu.plan import TILE_ROWS, first_key, launch_at
from kernels.cpu.product import PANEL_ROWS, WIDE_ROWS, block_product, panel_product
from kernels.cpu.runtime import compiled_short, inlined
from kernels.cpu.softmax import TILE_TOKENS, rescale, softmax_tile
from kernels.cpu.vector import FLOAT32, LANES, item_bytes, load, load_int32, load_scalar, record_at, store
from kernels.formats import FORMAT_MASK

LINE_BYTES = 64  # of a cache line
PANEL = LANES * 4  # bytes of a panel's row
# Not literals, of which each would make a variant of its own.
AFRESH, ON_TOP = cast(bool, np.bool_(False)), cast(bool, np.bool_(True))
_FIRST, _WIDE, _WIDER = cast(int, np.int64(0)), cast(int, np.int64(LANES)), cast(int, np.int64(2 * LANES))

# A thread's own record, at the begin of its scratch memory: the tile that it works at, and the addresses of its arrays,
# all float32, each beginning on a cache line.
THREAD = np.dtype(
    [
        (name, np.int64)
        for name in (
            "row", "head_begin", "head_count", "query_count",
            "position",  # of the first query
            "begin",  # of the tile, a multiple of TILE_TOKENS
            "first", "end",  # keys of the tile that any of the queries sees
            "is_native",  # whether all blocks of the tile are
            "query",  # [rows, head_size], scaled
            "scores",  # [rows, TILE_TOKENS], then probabilities
            "out", "top", "total",  # [rows, head_size], [rows], [rows]: the state of the rows in this split
            "merged_out", "merged_top", "merged_total",  # the same of all splits so far
            "keys", "values",  # [TILE_TOKENS / 16, head_size, 16], [head_size / 16, TILE_TOKENS, 16]
            # What decodes of blocks that are not native need beside (see `mixed`).
            "has_sums", "sums",  # whether there are, and [rows]: the sum over a query's channels
            "folded",  # [rows, head_size]: queries times the scales of keys by channel
            "scales",  # [4, TILE_TOKENS]: of one head's keys, minimums of keys, scales of values, minimums of values
        )
    ],
    align=True,
)  # fmt: skip
thread_at = record_at(THREAD)
_THREAD_BYTES = -(-THREAD.itemsize // LINE_BYTES) * LINE_BYTES


@compiled_short
def lay_out(thread: int, num_query_heads: int, head_size: int) -> int:
    """Write into the record of a thread where the arrays of its scratch memory are; returns where the memory ends."""
    rows = max(TILE_ROWS, (num_query_heads + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS)
    wide, narrow = 4 * rows * head_size, (4 * rows + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    query = thread + _THREAD_BYTES
    scores = query + 3 * wide
    top = scores + 4 * rows * TILE_TOKENS
    keys = top + 4 * narrow
    values = keys + 4 * TILE_TOKENS * head_size
    own = thread_at(thread)
    own.query, own.out, own.merged_out, own.scores = query, query + wide, query + 2 * wide, scores
    own.top, own.total, own.merged_top, own.merged_total = top, top + narrow, top + 2 * narrow, top + 3 * narrow
    own.keys, own.values = keys, values
    own.sums = values + 4 * TILE_TOKENS * head_size
    own.folded = own.sums + narrow
    own.scales = own.folded + wide
    end: int = own.scales + 4 * 4 * TILE_TOKENS
    return end


@inlined
def entry_at(launch_address: int, row: int, block_idx: int) -> int:
    """Return a row's block-table entry."""
    launch = launch_at(launch_address)
    entry: int = load_int32(launch.table, row * launch.table_width + block_idx)
    return entry


@inlined
def block_at(launch_address: int, row: int, block_idx: int) -> int:
    """Return the address of a row's block."""
    launch, entry = launch_at(launch_address), entry_at(launch_address, row, block_idx)
    address: int = launch.arena + entry_offset(entry, launch.formats, launch.slab_bytes)
    return address


@inlined
def entries_are_sound(launch_address: int, thread: int) -> bool:
    """Return whether the tile's blocks can be read, and note whether all are native; if not, the status says why."""
    launch, own = launch_at(launch_address), thread_at(thread)
    formats = 0
    for block_idx in range(own.first // launch.block_size, (own.end - 1) // launch.block_size + 1):
        entry = entry_at(launch_address, own.row, block_idx)
        status = check_entry(entry, launch.formats, launch.slab_bytes, launch.arena_bytes)
        if status != FINE:
            launch.culprit, launch.status = entry, status
            return False
        formats |= entry & FORMAT_MASK
    own.is_native = formats == 0
    return True


@inlined
def _softmax_rows(launch_address: int, thread: int, row_begin: int) -> None:
    """Turn one head's scores into probabilities, and bring its rows' state to the new tops."""
    launch, own = launch_at(launch_address), thread_at(thread)
    for i in range(own.query_count):
        first = first_key(own.position + i, launch.window) - own.begin
        end = own.position + i + 1 - own.begin
        for r in range(row_begin + i * launch.group, row_begin + (i + 1) * launch.group):
            top, total = own.top + 4 * r, own.total + 4 * r
            scores = own.scores + 4 * TILE_TOKENS * r
            new_top, factor, added = softmax_tile(scores, first, end, launch.cap, load_scalar(top, FLOAT32))
            store(top, new_top, FLOAT32)
            store(total, np.float32(np.float32(load_scalar(total, FLOAT32) * factor) + added), FLOAT32)
            rescale(own.out + 4 * launch.head_size * r, launch.head_size, factor)


def decode_tile(launch_address: int, thread: int, tag: Any) -> None:
    """Bring a tile of keys into the state of a single query token's rows, block by block, where the blocks lie."""
    launch, own = launch_at(launch_address), thread_at(thread)
    first_block, end_block = own.first // launch.block_size, (own.end - 1) // launch.block_size + 1
    for b in range(first_block, end_block):
        block_scores(launch_address, thread, b, b + 1 < end_block, tag)
    for h in range(own.head_count):
        _softmax_rows(launch_address, thread, h * launch.group)
    for b in range(first_block, end_block):
        block_outputs(launch_address, thread, b, b + 1 < end_block, tag)


# Keys or values of one head in a block are a chunk. While one chunk is at work, the next but one is asked for, in the
# order in which they are read: all heads' keys of a block after those of the block before, then the values likewise.
# (Head by head, each with all its blocks, took a quarter longer: nearly every chunk was then in another page.)


@inlined
def chunk_ahead(chunk: int, h: int, heads: int, plane: int, following: int) -> int:
    """Return the chunk to ask for: two heads on, or as many beyond the first head's chunk in what follows."""
    step = min(2, heads)
    return chunk + step * plane if h + step < heads else following + (h + step - heads) * plane


@inlined
def block_scores(launch_address: int, thread: int, b: int, keys_follow: bool, tag: Any) -> None:
    """Multiply the queries of all the unit's heads by a block's keys."""
    launch, own = launch_at(launch_address), thread_at(thread)
    item, size, block_size = item_bytes(tag), launch.head_size, launch.block_size
    plane, group, heads = block_size * size * item, launch.group, own.head_count
    keys = block_at(launch_address, own.row, b) + own.head_begin * plane
    if keys_follow:
        following = block_at(launch_address, own.row, b + 1) + own.head_begin * plane
    else:
        first = block_at(launch_address, own.row, own.first // block_size)
        following = first + (launch.num_kv_heads + own.head_begin) * plane
    lanes = min(_WIDER if group <= WIDE_ROWS else _WIDE, block_size)
    for h in range(heads):
        chunk, scores = keys + h * plane, own.scores + 4 * (TILE_TOKENS * h * group + b * block_size - own.begin)
        ahead = chunk_ahead(chunk, h, heads, plane, following)
        for t in range(0, block_size, lanes):
            block_product(
                group, lanes, scores + 4 * t, 4 * TILE_TOKENS, own.query + 4 * size * h * group, 4 * size,
                chunk + t * item, block_size * item, size, AFRESH, ahead + t * size * item, tag,
            )  # fmt: skip


@inlined
def block_outputs(launch_address: int, thread: int, b: int, values_follow: bool, tag: Any) -> None:
    """Add a block's values, times their probabilities, to the state of all the unit's heads."""
    launch, own = launch_at(launch_address), thread_at(thread)
    item, size, block_size = item_bytes(tag), launch.head_size, launch.block_size
    plane, group, heads = block_size * size * item, launch.group, own.head_count
    values_at = (launch.num_kv_heads + own.head_begin) * plane
    values = block_at(launch_address, own.row, b) + values_at
    # After the last block's values come the keys of the next tile; where there is none, what is asked for is not used.
    following = block_at(launch_address, own.row, min(b + 1, launch.table_width - 1))
    following += values_at if values_follow else own.head_begin * plane
    first = max(own.first, b * block_size)
    count = min(own.end, (b + 1) * block_size) - first
    for h in range(heads):
        chunk, outs = values + h * plane, own.out + 4 * size * h * group
        ahead = chunk_ahead(chunk, h, heads, plane, following)
        scores = own.scores + 4 * (TILE_TOKENS * h * group + first - own.begin)
        d = _FIRST
        while d < size:
            lanes = _WIDER if group <= WIDE_ROWS and d + _WIDER <= size else _WIDE
            block_product(
                group, lanes, outs + 4 * d, 4 * size, scores, 4 * TILE_TOKENS,
                chunk + ((first - b * block_size) * size + d) * item, size * item, count, ON_TOP,
                ahead + d * block_size * item, tag,
            )  # fmt: skip
            d += lanes


def prefill_tile(launch_address: int, thread: int, tag: Any) -> None:
    """Bring a tile of keys into the state of many query tokens' rows of one head, by float32 copies."""
    launch, own = launch_at(launch_address), thread_at(thread)
    for b in range(own.first // launch.block_size, (own.end - 1) // launch.block_size + 1):
        gather_block(launch_address, thread, b, tag)
    multiply_panels(launch_address, thread)


@inlined
def multiply_panels(launch_address: int, thread: int) -> None:
    """Bring the panels' keys and values into the state of the unit's rows."""
    launch, own = launch_at(launch_address), thread_at(thread)
    size, begin, end = launch.head_size, own.first - own.begin, own.end - own.begin
    rows = (own.query_count * launch.group + PANEL_ROWS - 1) // PANEL_ROWS * PANEL_ROWS  # what pads them is never read
    for t in range(begin // LANES * LANES, end, LANES):
        panel_product(
            rows, own.scores + 4 * t, 4 * TILE_TOKENS, own.query, 4 * size, own.keys + 4 * size * t, size, AFRESH
        )
    _softmax_rows(launch_address, thread, _FIRST)
    for d in range(0, size, LANES):
        values = own.values + 4 * TILE_TOKENS * d + PANEL * begin
        panel_product(
            rows, own.out + 4 * d, 4 * size, own.scores + 4 * begin, 4 * TILE_TOKENS, values, end - begin, ON_TOP
        )


@inlined
def gather_block(launch_address: int, thread: int, b: int, tag: Any) -> None:
    """Copy one head's keys and values of a native block into panels; values of tokens that nobody sees stay behind."""
    launch, own = launch_at(launch_address), thread_at(thread)
    item, size, block_size = item_bytes(tag), launch.head_size, launch.block_size
    plane = block_size * size * item
    block, begin = block_at(launch_address, own.row, b), b * block_size - own.begin
    copy_keys(block + own.head_begin * plane, own.keys, begin, size, block_size, tag)
    values = block + (launch.num_kv_heads + own.head_begin) * plane
    first, end = max(0, own.first - own.begin - begin), min(block_size, own.end - own.begin - begin)
    copy_values(values, own.values, begin, first, end, size, tag)


@inlined
def copy_keys(keys: int, panels: int, begin: int, size: int, block_size: int, tag: Any) -> None:
    """Copy a head's keys of a native block into panels; the block's first token is the tile's `begin`."""
    item = item_bytes(tag)
    if block_size % LANES == 0:
        for t in range(0, block_size, LANES):
            panel = panels + 4 * size * (begin + t)
            for d in range(size):
                store(panel + PANEL * d, load(keys + (d * block_size + t) * item, tag), FLOAT32)
    else:
        panel = panels + 4 * size * (begin // LANES * LANES) + 4 * (begin % LANES)
        for d in range(size):
            for t in range(block_size):
                store(panel + PANEL * d + 4 * t, load_scalar(keys + (d * block_size + t) * item, tag), FLOAT32)


@inlined
def copy_values(values: int, panels: int, begin: int, first: int, end: int, size: int, tag: Any) -> None:
    """Copy a head's values of tokens first <= t < end of a native block into panels; t = 0 is the tile's `begin`."""
    item = item_bytes(tag)
    for t in range(first, end):
        for d in range(0, size, LANES):
            row = panels + 4 * TILE_TOKENS * d + PANEL * (begin + t)
            store(row, load(values + (t * size + d) * item, tag), FLOAT32)
