"""The oracle: every operation in plain torch, written to be read and believed, not to be fast.

Planes are token-major: [num_kv_heads, block_size, head_size]. Arithmetic is in float32.
"""

from collections.abc import Collection
from itertools import product

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, AttentionParams
from kernels.errors import OutOfArenaError, UnsupportedFormatError, UnsupportedShapeError
from kernels.formats import (
    PLACES_PER_SLAB,
    RECIPES,
    Codec,
    Encoding,
    Format,
    Group,
    KVLayout,
    block_of,
    entry,
    format_of,
)
from kernels.quantize import Quantized, dequantize, pack_halves, quantize, unpack_halves

_DTYPES = {Encoding.UINT8: torch.uint8, Encoding.FLOAT8: torch.float8_e4m3fn, Encoding.UINT4: torch.uint8}


class ReferenceBackend:
    """kernels.dispatch.Backend on any device that torch has."""

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                raise OutOfArenaError(f"slot {slot} lies outside the arena of {layer_arena.numel()} bytes")
            block_id, offset = divmod(slot, layout.block_size)
            planes = _Block(layer_arena, entry(block_id, Format.NATIVE), layout)
            planes.elements("key")[:, offset] = key[token]
            planes.elements("value")[:, offset] = value[token]

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
        if query.shape[1] % layout.num_kv_heads != 0:
            raise UnsupportedShapeError(
                f"{query.shape[1]} query heads cannot share {layout.num_kv_heads} KV heads evenly"
            )
        begins = batch.cu_seqlens_q.tolist()
        for row, context_len in enumerate(batch.context_lens.tolist()):
            tokens = slice(begins[row], begins[row + 1])
            if tokens.start < tokens.stop:
                num_blocks = -(-context_len // layout.block_size)
                entries = batch.block_table[row, :num_blocks].tolist()
                blocks = [_Block(layer_arena, e, layout) for e in entries]
                key = torch.cat([block.read("key") for block in blocks], dim=1)[:, :context_len]
                value = torch.cat([block.read("value") for block in blocks], dim=1)[:, :context_len]
                out[tokens] = attend(query[tokens].float(), key, value, params).to(out.dtype)

    def copy_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        pairs = list(zip(src_entries.tolist(), dst_entries.tolist(), strict=True))
        for source, target in pairs:
            if format_of(source) is not format_of(target):
                raise UnsupportedFormatError(f"block-table entry {target} has another format than {source}, its source")
        for source_block, target_block in _block_pairs(arena, pairs, layout):
            target_block.data.copy_(source_block.data)

    def requantize_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        pairs = list(zip(src_entries.tolist(), dst_entries.tolist(), strict=True))
        for source, target in pairs:
            if format_of(target) <= format_of(source):
                raise UnsupportedFormatError(
                    f"block-table entry {target} has no narrower format than {source}, its source"
                )
        for source_block, target_block in _block_pairs(arena, pairs, layout):
            for side in ("key", "value"):
                if source_block.codec(side) == target_block.codec(side):
                    target_block.copy(side, source_block)
                else:
                    target_block.write(side, quantize(source_block.read(side), target_block.codec(side)))

    def zero_blocks(self, arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        for block in [_Block(layer, e, layout) for e in entries.tolist() for layer in arena]:
            block.data.zero_()

    def warm_up(
        self,
        layout: KVLayout,
        num_query_heads: int,
        params: AttentionParams,
        formats: Collection[Format] = (Format.NATIVE,),
    ) -> None:
        """Do nothing: there is nothing to compile."""


def attend(query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
    """Return the attention of a context's last tokens to all of it, float32 [query_len, num_query_heads, head_size].

    Args:
        query: float32 [query_len, num_query_heads, head_size], the tokens at the context's end.
        key, value: float32 [num_kv_heads, context_len, head_size].
        params: scale, window, soft cap.
    """
    query_len, num_heads, _ = query.shape
    num_kv_heads, context_len, _ = key.shape
    group = num_heads // num_kv_heads
    scores = torch.einsum("qhd,hkd->hqk", query, key.repeat_interleave(group, 0)) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    position = torch.arange(context_len - query_len, context_len, device=query.device)[:, None]
    token = torch.arange(context_len, device=query.device)[None, :]
    seen = token <= position
    if params.sliding_window is not None:
        seen &= token > position - params.sliding_window
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", probabilities, value.repeat_interleave(group, 0))


class _Block:
    """One block of one layer, as views into the arena."""

    def __init__(self, layer_arena: Tensor, entry: int, layout: KVLayout) -> None:
        """Raise UnsupportedFormatError or OutOfArenaError where the entry names no block."""
        self.layout, self.format = layout, format_of(entry)
        begin, size = layout.byte_offset(entry), layout.block_bytes(self.format)
        outside = block_of(entry) % PLACES_PER_SLAB >= layout.blocks_per_slab(self.format)
        if entry < 0 or outside or begin + size > layer_arena.numel():
            raise OutOfArenaError(f"block-table entry {entry} names a place outside the arena")
        self.data = layer_arena.view(-1)[begin : begin + size]

    def codec(self, side: str) -> Codec:
        """Return how the keys ("key") or the values ("value") are encoded."""
        recipe = RECIPES[self.format]
        return recipe.key if side == "key" else recipe.value

    def plane(self, name: str) -> Tensor:
        """Return a plane's bytes."""
        plane = self.layout.planes(self.format)[name]
        return self.data[plane.offset : plane.offset + plane.num_bytes]

    def elements(self, side: str) -> Tensor:
        """Return native elements or codes, [num_kv_heads, block_size, head_size (the half of it for int4)]."""
        dtype = _DTYPES.get(self.codec(side).encoding) or getattr(torch, self.layout.native_dtype)
        return self.plane(side).view(dtype).view(self.layout.num_kv_heads, self.layout.block_size, -1)

    def scales(self, name: str, codec: Codec) -> Tensor:
        """Return a plane of scales or minimums, with size 1 in the dimension that shares them."""
        shape = (-1, 1) if codec.group is Group.TOKEN else (1, -1)
        return self.plane(name).view(torch.float16).view(self.layout.num_kv_heads, *shape)

    def read(self, side: str) -> Tensor:
        """Return the keys or the values as float32 [num_kv_heads, block_size, head_size]."""
        codec, codes = self.codec(side), self.elements(side)
        if codec.group is None:
            return codes.float()
        if codec.encoding is Encoding.UINT4:
            codes = unpack_halves(codes, self.layout.head_size)
        minimum = self.scales(f"{side}_minimum", codec) if codec.has_minimum else None
        return dequantize(Quantized(codes, self.scales(f"{side}_scale", codec), minimum))

    def write(self, side: str, quantized: Quantized) -> None:
        """Write the keys or the values."""
        codec, codes = self.codec(side), quantized.codes
        self.elements(side).copy_(pack_halves(codes) if codec.encoding is Encoding.UINT4 else codes)
        self.scales(f"{side}_scale", codec).copy_(quantized.scale)
        if quantized.minimum is not None:
            self.scales(f"{side}_minimum", codec).copy_(quantized.minimum)

    def copy(self, side: str, other: "_Block") -> None:
        """Take over the keys or the values of a block in which they are encoded alike."""
        for name in self.layout.planes(self.format):
            if name.startswith(side):
                self.plane(name).copy_(other.plane(name))


def _block_pairs(arena: Tensor, pairs: list[tuple[int, int]], layout: KVLayout) -> list[tuple[_Block, _Block]]:
    """Return the blocks of pairs of entries in every layer; raises before anything is written."""
    return [
        (_Block(layer, source, layout), _Block(layer, target, layout))
        for (source, target), layer in product(pairs, arena)
    ]
