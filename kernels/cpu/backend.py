"""The CPU's backend: checks what it is given, writes it into a launch record, runs the compiled loops on all threads.

A launch costs about ten microseconds before its threads work: tensors pass as addresses, scratch memory is kept from
one launch to the next, and nothing is converted or allocated.
"""

import math
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.checks import check_integers, check_key_value, check_query_out, group_size
from kernels.cpu.attention import run_units
from kernels.cpu.blocks import WRITE, check_entries, copy_entries, fill_write, write_chunks, zero_entries
from kernels.cpu.mixed import mixed_decode_tile, mixed_prefill_tile
from kernels.cpu.places import BAD_FORMAT, BAD_ROW, FINE, NOT_COMPILED, format_table
from kernels.cpu.plan import LAUNCH, UNIT_BYTES, plan_launch
from kernels.cpu.requantize import REQUANTIZE, requantize_items, scratch_bytes
from kernels.cpu.rows import ACTIVATION_CODES
from kernels.cpu.runtime import c_function, run_on_threads
from kernels.cpu.softmax import TILE_TOKENS
from kernels.cpu.tiles import LINE_BYTES, THREAD, decode_tile, lay_out, prefill_tile
from kernels.cpu.vector import BFLOAT16, FLOAT16, FLOAT32, LANES
from kernels.dispatch import AttentionBatch, AttentionParams
from kernels.errors import (
    InvalidBatchError,
    KernelError,
    OutOfArenaError,
    UnsupportedFormatError,
    UnsupportedShapeError,
)
from kernels.formats import FORMAT_MASK, Format, KVLayout

_PART_BYTES = 64 << 20  # for parts of split contexts; pages that no launch touches cost nothing
_FIRST_UNITS = 1024
_NO_WINDOW = 1 << 40  # more keys than any context has
_SERIAL_WRITE_ELEMENTS = 1 << 14  # waking the threads costs as much as writing so many
_BLOCK_SIZES = (8, 16, 32, 64)
_TAGS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}


class CpuBackend:
    """kernels.dispatch.Backend for CPUs. Head sizes are multiples of 16; block sizes are 8, 16, 32 or 64."""

    def __init__(self) -> None:
        self._parts, self._units, self._scratch = (
            _Buffer(_PART_BYTES),
            _Buffer(_FIRST_UNITS * UNIT_BYTES),
            _Buffer(0),
        )
        self._attentions: dict[tuple[KVLayout, int, AttentionParams], _Attention] = {}
        self._writes: dict[KVLayout, _Write] = {}
        self._requantizes: dict[KVLayout, _Requantize] = {}

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        write = self._writes.get(layout)
        if write is None:
            write = self._writes[layout] = _Write(layout)
        check_key_value(key, value, layout)
        num_tokens, item = key.shape[0], key.element_size()
        (key_token, key_head, _), (value_token, value_head, _) = key.stride(), value.stride()
        check_integers(slot_mapping, torch.int64, num_tokens, "slot_mapping")
        fill_write(
            write.address, key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr(), layer_arena.data_ptr(),
            key_token * item, key_head * item, value_token * item, value_head * item,
            _activation_code(key, "key"), num_tokens, layer_arena.numel(),
        )  # fmt: skip
        serial = num_tokens * write.token_elements < _SERIAL_WRITE_ELEMENTS
        run_on_threads(write.body, write.address, 1 if serial else torch.get_num_threads())
        if write.record["status"][0] != FINE:
            raise OutOfArenaError(
                f"slot {write.record['bad_slot'][0]} lies outside the arena of {layer_arena.numel()} bytes"
            )

    def paged_attention(
        self,
        query: Tensor,
        layer_arena: Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
        layout: KVLayout,
        out: Tensor,
    ) -> None:
        """See kernels.dispatch.Backend."""
        num_heads, table = query.shape[1], batch.block_table
        attention = self._attentions.get((layout, num_heads, params))
        if attention is None:
            attention = self._attentions[layout, num_heads, params] = _Attention(layout, num_heads, params)
        num_rows, num_threads = table.shape[0], torch.get_num_threads()
        check_query_out(query, out, layout.head_size)
        check_integers(table, torch.int32, num_rows * table.shape[1], "block_table")
        check_integers(batch.context_lens, torch.int32, num_rows, "context_lens")
        check_integers(batch.cu_seqlens_q, torch.int32, num_rows + 1, "cu_seqlens_q")
        self._scratch.reserve(num_threads * attention.scratch_bytes)
        call = (
            attention.address, query.shape[0],
            query.data_ptr(), query.stride(0) * query.element_size(), _activation_code(query, "query"),
            out.data_ptr(), out.stride(0) * out.element_size(), _activation_code(out, "out"),
            layer_arena.data_ptr(), layer_arena.numel(), table.data_ptr(), table.shape[1],
            batch.context_lens.data_ptr(), batch.cu_seqlens_q.data_ptr(), num_rows, num_threads, self._scratch.address,
        )  # fmt: skip
        status = self._launch(attention, call)
        if status == NOT_COMPILED:
            attention.compile_mixed()
            status = self._launch(attention, call)
        if status != FINE:
            raise _launch_error(status, int(attention.record["culprit"][0]))

    def _launch(self, attention: "_Attention", call: tuple[int, ...]) -> int:
        """Plan and run a launch; returns how it went."""
        num_units, num_threads = self._plan(*call)
        if num_units * UNIT_BYTES > self._units.num_bytes:
            self._units.reserve(num_units * UNIT_BYTES)
            self._plan(*call)
        run_on_threads(attention.body, attention.address, num_threads)
        return int(attention.record["status"][0])

    def _plan(self, *call: int) -> tuple[int, int]:
        units, parts, plan = self._units, self._parts, cast(Callable[..., tuple[int, int]], plan_launch)
        return plan(*call, units.address, units.num_bytes // UNIT_BYTES, parts.address, parts.num_bytes // 4)

    def requantize_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        requantize = self._requantizes.get(layout)
        if requantize is None:
            requantize = self._requantizes[layout] = _Requantize(layout)
        _check_pairs(arena, src_entries, dst_entries, layout)
        for pair in _pairs_where(dst_entries & FORMAT_MASK <= src_entries & FORMAT_MASK, src_entries, dst_entries):
            raise UnsupportedFormatError(
                "block-table entry {1} has no narrower format than {0}, its source".format(*pair)
            )
        num_threads = torch.get_num_threads()
        self._scratch.reserve(num_threads * requantize.scratch_bytes)
        job = requantize.record[0]
        job["arena"], job["num_layers"], job["arena_bytes"] = arena.data_ptr(), arena.shape[0], arena[0].numel()
        job["sources"], job["targets"] = src_entries.data_ptr(), dst_entries.data_ptr()
        job["num_entries"], job["scratch"] = src_entries.shape[0], self._scratch.address
        job["next_item"], job["next_thread"] = 0, 0
        run_on_threads(requantize.body, requantize.address, num_threads)

    def copy_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        _check_pairs(arena, src_entries, dst_entries, layout)
        for pair in _pairs_where(dst_entries & FORMAT_MASK != src_entries & FORMAT_MASK, src_entries, dst_entries):
            raise UnsupportedFormatError("block-table entry {1} has another format than {0}, its source".format(*pair))
        copy_entries(
            arena.data_ptr(), arena.shape[0], src_entries.data_ptr(), dst_entries.data_ptr(), src_entries.shape[0],
            *_place(arena, layout),
        )  # fmt: skip

    def zero_blocks(self, arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        _check_entries(arena, entries, layout)
        zero_entries(
            arena.data_ptr(), arena.shape[0], entries.data_ptr(), entries.shape[0], *_place(arena, layout)
        )  # fmt: skip

    def warm_up(
        self,
        layout: KVLayout,
        num_query_heads: int,
        params: AttentionParams,
        formats: Collection[Format] = (Format.NATIVE,),
    ) -> None:
        """See kernels.dispatch.Backend."""
        arena = torch.zeros(1, 1, layout.slab_bytes, dtype=torch.uint8)
        entries = torch.zeros(1, dtype=torch.int32)
        self.zero_blocks(arena, entries, layout)
        self.copy_blocks(arena, entries, entries, layout)
        key = torch.zeros(1, layout.num_kv_heads, layout.head_size)
        self.write_kv(arena[0], key, key, torch.zeros(1, dtype=torch.int64), layout)
        query = torch.zeros(1, num_query_heads, layout.head_size)
        one = torch.ones(1, dtype=torch.int32)
        batch = AttentionBatch(entries.view(1, 1), one, torch.tensor([0, 1], dtype=torch.int32), 1)
        self.paged_attention(query, arena[0], batch, params, layout, query)
        if any(fmt is not Format.NATIVE for fmt in formats):
            self._attentions[layout, num_query_heads, params].compile_mixed()
            self.requantize_blocks(arena, entries[:0], entries[:0], layout)


class _Buffer:
    """Memory that begins on a cache line and grows when asked to; what it held is then lost."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -1
        self.reserve(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Make it at least as large."""
        if num_bytes > self.num_bytes:
            self._memory = np.empty(num_bytes + LINE_BYTES, np.uint8)
            self.num_bytes = num_bytes
            self.address = -(-self._memory.ctypes.data // LINE_BYTES) * LINE_BYTES


class _Attention:
    """What all launches of one kind of layer have in common: the record, its fixed fields filled in, and the loop."""

    def __init__(self, layout: KVLayout, num_query_heads: int, params: AttentionParams) -> None:
        _check_layout(layout)
        group = group_size(num_query_heads, layout, params.sliding_window)
        self.record = np.zeros(1, LAUNCH)
        self.address = self.record.ctypes.data
        thread = np.zeros(1, THREAD)  # named: it must outlive the call, which writes to it
        thread_address = thread.ctypes.data
        self.scratch_bytes = lay_out(thread_address, num_query_heads, layout.head_size) - thread_address
        self.body = _c_function(run_units, 1, None)
        fixed = self.record[0]
        self._native_dtype = layout.native_dtype
        self._set_tiles(decode_tile, prefill_tile)
        fixed["num_kv_heads"], fixed["group"] = layout.num_kv_heads, group
        fixed["head_size"], fixed["block_size"] = layout.head_size, layout.block_size
        fixed["slab_bytes"], fixed["formats"] = layout.slab_bytes, _formats(layout).ctypes.data
        fixed["scratch_bytes"] = self.scratch_bytes
        fixed["window"] = params.sliding_window or _NO_WINDOW
        # The kernels count in powers of 2, and take a capped score divided by its cap.
        fixed["query_scale"] = params.scale / params.soft_cap if params.soft_cap else params.scale * math.log2(math.e)
        fixed["cap"] = params.soft_cap * math.log2(math.e) if params.soft_cap else 0.0

    def compile_mixed(self) -> None:
        """Compile, or load, what tiles with blocks of other formats need: over twice as much as native ones do."""
        self._set_tiles(mixed_decode_tile, mixed_prefill_tile)

    def _set_tiles(self, *tiles: Callable[[int, int, Any], None]) -> None:
        for tile in tiles:
            self.record[0][tile.__name__] = _c_function(tile, 2, self._native_dtype)


class _Write:
    """What all writes into arenas of one layout have in common."""

    def __init__(self, layout: KVLayout) -> None:
        _check_layout(layout)
        self.token_elements = layout.num_kv_heads * layout.head_size
        self.record = np.zeros(1, WRITE)
        self.address = self.record.ctypes.data
        self.body = _c_function(write_chunks, 1, layout.native_dtype)
        fixed = self.record[0]
        fixed["num_heads"], fixed["head_size"] = layout.num_kv_heads, layout.head_size
        fixed["block_size"] = layout.block_size
        fixed["slab_bytes"], fixed["block_bytes"] = layout.slab_bytes, layout.block_bytes(Format.NATIVE)


class _Requantize:
    """What all calls of requantize_blocks on arenas of one layout have in common."""

    def __init__(self, layout: KVLayout) -> None:
        _check_layout(layout)
        self.record = np.zeros(1, REQUANTIZE)
        self.address = self.record.ctypes.data
        self.body = _c_function(requantize_items, 1, layout.native_dtype)
        self.scratch_bytes = scratch_bytes(layout.head_size, layout.block_size)
        fixed = self.record[0]
        fixed["num_heads"], fixed["head_size"] = layout.num_kv_heads, layout.head_size
        fixed["block_size"], fixed["scratch_bytes"] = layout.block_size, self.scratch_bytes
        fixed["slab_bytes"], fixed["formats"] = layout.slab_bytes, _formats(layout).ctypes.data


@cache
def _formats(layout: KVLayout) -> npt.NDArray[np.void]:
    """Return a layout's formats for compiled code, which is given their address: so they are kept."""
    return format_table(layout)


@cache
def _c_function(function: Callable[..., None], num_addresses: int, native_dtype: str | None) -> int:
    return c_function(function, num_addresses, None if native_dtype is None else _TAGS[native_dtype])


def _check_layout(layout: KVLayout) -> None:
    if layout.head_size % LANES != 0:
        raise UnsupportedShapeError(f"head size {layout.head_size} is not a multiple of {LANES}")
    if layout.block_size not in _BLOCK_SIZES:
        raise UnsupportedShapeError(f"block size {layout.block_size} is not one of {', '.join(map(str, _BLOCK_SIZES))}")
    assert TILE_TOKENS % layout.block_size == 0


def _activation_code(tensor: Tensor, name: str) -> int:
    code = ACTIVATION_CODES.get(tensor.dtype)
    if code is None:
        raise UnsupportedShapeError(f"{name} is {tensor.dtype}, not one of {', '.join(map(str, ACTIVATION_CODES))}")
    return code


def _place(arena: Tensor, layout: KVLayout) -> tuple[int, int, int]:
    """Return what compiled code needs to find blocks: formats, the bytes of a slab and of a layer's arena."""
    return _formats(layout).ctypes.data, layout.slab_bytes, arena.shape[1] * arena.shape[2]


def _check_entries(arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
    check_integers(entries, torch.int32, entries.shape[0], "entries")
    if not arena.is_contiguous():
        raise UnsupportedShapeError("the arena is not contiguous")
    status, bad_entry = check_entries(entries.data_ptr(), entries.shape[0], *_place(arena, layout))
    if status != FINE:
        raise _launch_error(status, bad_entry)


def _check_pairs(arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
    check_integers(dst_entries, torch.int32, src_entries.shape[0], "dst_entries")
    _check_entries(arena, src_entries, layout)
    _check_entries(arena, dst_entries, layout)


def _pairs_where(wrong: Tensor, src_entries: Tensor, dst_entries: Tensor) -> list[tuple[int, int]]:
    return list(zip(src_entries[wrong].tolist(), dst_entries[wrong].tolist(), strict=True))


def _launch_error(status: int, culprit: int) -> KernelError:
    """Return the error for a status and the entry or row that it is about."""
    if status == BAD_ROW:
        return InvalidBatchError(
            f"row {culprit}: its query tokens are not within query, are more than its context, or the context is more"
            " than its block table holds"
        )
    if status == BAD_FORMAT:
        return UnsupportedFormatError(
            f"block-table entry {culprit} has format code {culprit & FORMAT_MASK}, which names no format"
        )
    return OutOfArenaError(f"block-table entry {culprit} names a place outside the arena")
