"""The GPU's backend: checks shapes on the host, and launches Triton's kernels on the current stream.

A launch never waits for the device, and its grid follows from shapes and `max_query_len` alone: so launches can be
captured in a CUDA graph and replayed with other contents.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import check_integers, check_key_value, check_query_out, describe, group_size
from kernels.dispatch import AttentionBatch, AttentionParams
from kernels.errors import UnsupportedShapeError
from kernels.formats import Format, KVLayout
from kernels.triton.blocks import CHUNK_BYTES, copy_kernel, write_kernel, zero_kernel
from kernels.triton.decode import MAX_SPLITS, MIN_SPLIT, decode_kernel, merge_kernel, most_splits
from kernels.triton.places import block_bytes, planes
from kernels.triton.prefill import num_tiles, prefill_kernel
from kernels.triton.requantize import requantize_kernel
from kernels.triton.tuning import COMPILER_OPTIONS, Chip, Tuning, head_pad, tune_decode, tune_prefill

TRITON_DTYPES: Mapping[str, tl.dtype] = MappingProxyType(
    {"bfloat16": tl.bfloat16, "float16": tl.float16, "float32": tl.float32}
)
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_SIZES = (8, 16, 32, 64)
_ALIGNMENT = 16  # bytes of an address, and elements of a stride: kernels are compiled for nothing less
_MAX_HEAD_SIZE = 256
# Enough to fill any chip several times over; more would only be programs that find no split to compute.
_DECODE_PROGRAMS = 8192


class TritonBackend:
    """kernels.dispatch.Backend for GPUs. Head sizes are multiples of 16 up to 256; block sizes are 8, 16, 32 or 64.

    Tensors are on the current device. Shapes, dtypes and strides are checked before a launch; tensors begin at a
    multiple of 16 bytes, and their strides are multiples of 16 elements. What stands in tensors on the device is not
    checked, for that would mean to wait for it. A slot outside the arena is skipped by write_kv. An entry outside it,
    or of no format, is skipped by copy_blocks, zero_blocks and requantize_blocks, and so is a pair of other formats
    than these take. Attention moves an entry that lies outside the arena into it, and cuts a context to what its block
    table holds. Whoever makes the batch checks it before.

    Attention serves the formats that `warm_up` was told of for the layout, in any order. As long as these are native
    alone, it takes every entry for a native one; from then on it leaves out the tokens of blocks of other formats.

    A batch may be padded to the shapes of a captured graph: write_kv skips slot -1, and a row with context length 0
    gets zeros in `out`, whatever its query length; a row without queries costs nothing.
    """

    def __init__(
        self,
        device: torch.device | str = "cuda",
        chip: Chip | None = None,
        product_dtypes: Mapping[str, tl.dtype] = TRITON_DTYPES,
        formats: Collection[Format] = (),
    ) -> None:
        """Make a backend that warms up on `device`, tuned for `chip` (None: the current one).

        Keys, values and weights are multiplied in `product_dtypes` of the native dtype: itself, on a GPU. Attention
        serves blocks of `formats` besides native ones, before any are named to `warm_up`.
        """
        self._device = torch.device(device)
        self._given_chip = chip
        self._product_dtypes = product_dtypes
        self._attentions: dict[tuple[KVLayout, int, AttentionParams], Attention] = {}
        self._first_formats = frozenset({Format.NATIVE, *formats})
        self._formats: dict[KVLayout, frozenset[Format]] = {}
        self._writes: dict[KVLayout, dict[str, Any]] = {}
        self._requantizations: dict[KVLayout, dict[str, Any]] = {}

    @cached_property
    def _chip(self) -> Chip:
        if self._given_chip is not None:
            return self._given_chip
        target = triton.runtime.driver.active.get_current_target()
        return Chip(target.backend, target.arch)

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend; a slot outside the arena is skipped."""
        constants = self._writes.get(layout)
        if constants is None:
            constants = self._writes[layout] = write_constants(layout)
        check_key_value(key, value, layout)
        num_tokens = key.shape[0]
        check_integers(slot_mapping, torch.int64, num_tokens, "slot_mapping")
        _check_arena(layer_arena, layout)
        strides = [_stride(tensor, dim, name) for tensor, name in ((key, "key"), (value, "value")) for dim in (0, 1)]
        if num_tokens > 0:
            write_kernel[(num_tokens,)](
                layer_arena, key, value, slot_mapping, layer_arena.shape[0], *strides, **constants
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
        """See kernels.dispatch.Backend; what is wrong in a batch on the device goes unnoticed."""
        num_tokens, num_heads, _ = query.shape
        num_rows, table_width = batch.block_table.shape
        attention = self._attention(layout, num_heads, params)
        check_query_out(query, out, layout.head_size)
        check_integers(batch.block_table, torch.int32, num_rows * table_width, "block_table")
        check_integers(batch.context_lens, torch.int32, num_rows, "context_lens")
        check_integers(batch.cu_seqlens_q, torch.int32, num_rows + 1, "cu_seqlens_q")
        _check_arena(layer_arena, layout)
        strides = _stride(query, 0, "query"), _stride(out, 0, "out")
        if num_tokens == 0 or num_rows == 0:
            return
        num_slabs = layer_arena.shape[0]
        tables = batch.block_table, batch.context_lens, batch.cu_seqlens_q
        if batch.max_query_len > 1:
            tiles = num_tiles(num_tokens, num_rows, attention.tile_queries)
            prefill_kernel[tiles, layout.num_kv_heads](
                query, out, layer_arena, *tables, num_rows, num_tokens, table_width, num_slabs, *strides,
                **attention.prefill,
            )  # fmt: skip
        max_splits = most_splits(table_width * layout.block_size)
        slices = max(1, min(max_splits, _DECODE_PROGRAMS // (num_rows * layout.num_kv_heads)))
        parts = num_rows * num_heads * max_splits if max_splits > 1 else 0
        split_outs = torch.empty(parts * layout.head_size, dtype=torch.float32, device=query.device)
        split_sums = torch.empty(parts, dtype=torch.float32, device=query.device)
        decode_kernel[layout.num_kv_heads, num_rows, slices](
            query, out, split_outs, split_sums, layer_arena, *tables, num_tokens, table_width, num_slabs, max_splits,
            *strides, **attention.decode,
        )  # fmt: skip
        if max_splits > 1:
            merge_kernel[num_heads, num_rows](
                out, split_outs, split_sums, *tables[1:], num_tokens, table_width, max_splits, strides[1],
                **attention.merge,
            )  # fmt: skip

    def _attention(self, layout: KVLayout, num_heads: int, params: AttentionParams) -> "Attention":
        attention = self._attentions.get((layout, num_heads, params))
        if attention is None:
            dtype = self._product_dtypes[layout.native_dtype]
            formats = self._formats.get(layout, self._first_formats)
            attention = self._attentions[layout, num_heads, params] = attention_of(
                layout, num_heads, params, self._chip, dtype, formats
            )
        return attention

    def requantize_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend; a pair with a bad entry, or with a destination no narrower, is skipped."""
        num_entries = src_entries.shape[0]
        check_integers(src_entries, torch.int32, num_entries, "src_entries")
        check_integers(dst_entries, torch.int32, num_entries, "dst_entries")
        constants = self._requantizations.get(layout)
        if constants is None:
            constants = self._requantizations[layout] = requantize_constants(layout)
        _check_arena(arena[0], layout)
        if num_entries > 0:
            requantize_kernel[num_entries, arena.shape[0], layout.num_kv_heads](
                arena, src_entries, dst_entries, arena.shape[1], **constants
            )

    def copy_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend; a pair with a bad entry is skipped."""
        num_entries = src_entries.shape[0]
        check_integers(src_entries, torch.int32, num_entries, "src_entries")
        check_integers(dst_entries, torch.int32, num_entries, "dst_entries")
        _check_arena(arena[0], layout)
        if num_entries > 0:
            grid = _block_grid(arena, num_entries, layout)
            copy_kernel[grid](arena, src_entries, dst_entries, arena.shape[1], **block_constants(layout))

    def zero_blocks(self, arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend; a bad entry is skipped."""
        check_integers(entries, torch.int32, entries.shape[0], "entries")
        _check_arena(arena[0], layout)
        if entries.shape[0] > 0:
            zero_kernel[_block_grid(arena, entries.shape[0], layout)](
                arena, entries, arena.shape[1], **block_constants(layout)
            )

    def warm_up(
        self,
        layout: KVLayout,
        num_query_heads: int,
        params: AttentionParams,
        formats: Collection[Format] = (Format.NATIVE,),
    ) -> None:
        """Compile, or load from the cache, every kernel for activations of the native dtype.

        From then on attention serves the formats of this and of earlier calls for the layout.
        """
        self._add_formats(layout, formats)
        dtype, device = getattr(torch, layout.native_dtype), self._device
        arena = torch.zeros(1, 1, layout.slab_bytes, dtype=torch.uint8, device=device)
        width = MIN_SPLIT // layout.block_size + 1  # room for two splits, so that they are merged
        block_table = torch.zeros(2, width, dtype=torch.int32, device=device)
        entries = block_table[0, :1]
        self.zero_blocks(arena, entries, layout)
        self.copy_blocks(arena, entries, entries, layout)
        if any(fmt is not Format.NATIVE for fmt in formats):
            self.requantize_blocks(arena, entries, entries, layout)
        key = torch.zeros(3, layout.num_kv_heads, layout.head_size, dtype=dtype, device=device)
        self.write_kv(arena[0], key, key, torch.arange(3, device=device), layout)
        query = torch.zeros(3, num_query_heads, layout.head_size, dtype=dtype, device=device)
        batch = AttentionBatch(
            block_table=block_table,
            context_lens=torch.tensor([2, 1], dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
            max_query_len=2,
        )
        self.paged_attention(query, arena[0], batch, params, layout, torch.empty_like(query))

    def _add_formats(self, layout: KVLayout, formats: Collection[Format]) -> None:
        served = self._formats.get(layout, self._first_formats)
        if not served.issuperset(formats):
            self._formats[layout] = served.union(formats)
            self._attentions = {key: found for key, found in self._attentions.items() if key[0] != layout}


@dataclass(frozen=True, slots=True)
class Attention:
    """What all launches of one kind of layer have in common: each kernel's constants and launch options."""

    tile_queries: int  # tokens of a prefill tile
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]
    merge: Mapping[str, Any]


def attention_of(
    layout: KVLayout,
    num_query_heads: int,
    params: AttentionParams,
    chip: Chip,
    product_dtype: tl.dtype,
    formats: Collection[Format] = (),
) -> Attention:
    """Return the constants of a kind of layer on a chip whose blocks are native or of the formats.

    Raises UnsupportedShapeError where there is no kernel.
    """
    _check_layout(layout)
    group = group_size(num_query_heads, layout, params.sliding_window)
    if params.scale <= 0:
        raise UnsupportedShapeError(f"scale is {params.scale}, not above 0")
    prefill = tune_prefill(layout, group, params, chip, formats)
    decode = tune_decode(layout, group, chip, formats)
    common = {
        **block_constants(layout),
        "PLANES": planes(layout),
        "FORMATS": tuple(sorted({int(fmt) for fmt in (Format.NATIVE, *formats)})),
        "SCALE": params.scale,
        "WINDOW": params.sliding_window,
        "SOFT_CAP": params.soft_cap,
        "NUM_KV_HEADS": layout.num_kv_heads,
        "GROUP": group,
        "HEAD_SIZE": layout.head_size,
        "HEAD_PAD": head_pad(layout),
        "BLOCK_SIZE": layout.block_size,
        "NATIVE_DTYPE": TRITON_DTYPES[layout.native_dtype],
        "DOT_DTYPE": product_dtype,
    }
    of_merge = ("WINDOW", "HEAD_SIZE", "HEAD_PAD", "BLOCK_SIZE", *COMPILER_OPTIONS)
    return Attention(
        tile_queries=prefill.rows // group,
        prefill={**common, "TILE_ROWS": prefill.rows, **_options(prefill)},
        decode={**common, "GROUP_PAD": decode.rows, **_options(decode)},
        merge={**{name: common[name] for name in of_merge}, "TILE": decode.keys, "SPLITS": MAX_SPLITS, "num_warps": 4},
    )


def _options(tuning: Tuning) -> dict[str, Any]:
    return {"TILE": tuning.keys, "STAGES": tuning.num_stages, "num_warps": tuning.num_warps}


def write_constants(layout: KVLayout) -> dict[str, Any]:
    """Return the constants of write_kernel. Raises UnsupportedShapeError when there is no kernel for the layout."""
    _check_layout(layout)
    elements = 1 << (layout.num_kv_heads * layout.head_size - 1).bit_length()
    return {
        **block_constants(layout),
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_SIZE": layout.head_size,
        "BLOCK_SIZE": layout.block_size,
        "NATIVE_DTYPE": TRITON_DTYPES[layout.native_dtype],
        "ELEMENTS": elements,
        "num_warps": max(1, min(elements // 256, 8)),
    }


def block_constants(layout: KVLayout) -> dict[str, Any]:
    """Return the constants by which a kernel finds blocks, and the options of every launch."""
    return {"SLAB_BYTES": layout.slab_bytes, "BLOCK_BYTES": block_bytes(layout), **COMPILER_OPTIONS}


def requantize_constants(layout: KVLayout) -> dict[str, Any]:
    """Return the constants of requantize_kernel. Raises UnsupportedShapeError as `write_constants`."""
    _check_layout(layout)
    return {
        **block_constants(layout),
        "HEAD_SIZE": layout.head_size,
        "HEAD_PAD": head_pad(layout),
        "BLOCK_SIZE": layout.block_size,
        "PLANES": planes(layout),
        "NATIVE_DTYPE": TRITON_DTYPES[layout.native_dtype],
        "num_warps": max(1, min(layout.block_size * head_pad(layout) // 512, 8)),
    }


def _block_grid(arena: Tensor, num_entries: int, layout: KVLayout) -> tuple[int, int, int]:
    return num_entries, arena.shape[0], triton.cdiv(max(block_bytes(layout)), CHUNK_BYTES)


def _check_layout(layout: KVLayout) -> None:
    if layout.head_size % _ALIGNMENT != 0 or layout.head_size > _MAX_HEAD_SIZE:
        raise UnsupportedShapeError(
            f"head size {layout.head_size} is not a multiple of {_ALIGNMENT} up to {_MAX_HEAD_SIZE}"
        )
    if layout.block_size not in _BLOCK_SIZES:
        raise UnsupportedShapeError(f"block size {layout.block_size} is not one of {', '.join(map(str, _BLOCK_SIZES))}")


def _check_arena(layer_arena: Tensor, layout: KVLayout) -> None:
    if layer_arena.dtype != torch.uint8 or layer_arena.dim() != 2 or layer_arena.shape[1] != layout.slab_bytes:
        raise UnsupportedShapeError(
            f"a layer's arena is {describe(layer_arena)}, not uint8 [slabs, {layout.slab_bytes}]"
        )
    if not layer_arena.is_contiguous() or layer_arena.data_ptr() % _ALIGNMENT != 0:
        raise UnsupportedShapeError(f"the arena is not contiguous, or not aligned to {_ALIGNMENT} bytes")


def _stride(tensor: Tensor, dim: int, name: str) -> int:
    """Return a stride in elements, which kernels may count on to be a multiple of 16; raises UnsupportedShapeError."""
    if tensor.dtype not in _ACTIVATIONS:
        raise UnsupportedShapeError(f"{name} is {tensor.dtype}, not one of {', '.join(map(str, _ACTIVATIONS))}")
    stride = tensor.stride(dim) if tensor.shape[dim] > 1 else 0
    if stride % _ALIGNMENT != 0 or tensor.data_ptr() % _ALIGNMENT != 0:
        raise UnsupportedShapeError(
            f"{name} begins at no multiple of {_ALIGNMENT} bytes, or its stride of {stride} elements is no multiple of"
            f" {_ALIGNMENT}"
        )
    return stride
