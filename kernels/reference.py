"""The oracle: every operation in plain torch, written to be read and believed, not to be fast.

Blocks are token-major: K [num_kv_heads, block_size, head_size], then V of the same shape. Arithmetic is in float32.
"""

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, AttentionParams
from kernels.errors import OutOfArenaError, UnsupportedFormatError, UnsupportedShapeError
from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, block_of, entry, format_of


class ReferenceBackend:
    """kernels.dispatch.Backend on any device that torch has."""

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                raise OutOfArenaError(f"slot {slot} lies outside the arena of {layer_arena.numel()} bytes")
            block_id, offset = divmod(slot, layout.block_size)
            block = _native_block(layer_arena, entry(block_id, Format.NATIVE), layout)
            block[0, :, offset] = key[token].to(block.dtype)
            block[1, :, offset] = value[token].to(block.dtype)

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
                blocks = [_native_block(layer_arena, e, layout) for e in batch.block_table[row, :num_blocks].tolist()]
                key, value = torch.cat(blocks, dim=2)[:, :, :context_len].float()
                out[tokens] = attend(query[tokens].float(), key, value, params).to(out.dtype)

    def copy_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        sources = [_block_bytes(layer, e, layout) for e in src_entries.tolist() for layer in arena]
        targets = [_block_bytes(layer, e, layout) for e in dst_entries.tolist() for layer in arena]
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def zero_blocks(self, arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
        """See kernels.dispatch.Backend."""
        for block in [_block_bytes(layer, e, layout) for e in entries.tolist() for layer in arena]:
            block.zero_()

    def warm_up(self, layout: KVLayout, num_query_heads: int, params: AttentionParams) -> None:
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


def _block_bytes(layer_arena: Tensor, entry: int, layout: KVLayout) -> Tensor:
    """Return a view of the bytes of an entry's block; raises when it is not native or not in the arena."""
    fmt = format_of(entry)
    if fmt is not Format.NATIVE:
        raise UnsupportedFormatError(f"block-table entry {entry} has format code {fmt}; only native (0) is known here")
    begin, size = layout.byte_offset(entry), layout.block_bytes(fmt)
    outside = block_of(entry) % PLACES_PER_SLAB >= layout.blocks_per_slab(fmt)
    if entry < 0 or outside or begin + size > layer_arena.numel():
        raise OutOfArenaError(f"block-table entry {entry} names a place outside the arena")
    return layer_arena.view(-1)[begin : begin + size]


def _native_block(layer_arena: Tensor, entry: int, layout: KVLayout) -> Tensor:
    """Return a native block as a view [2 (K, V), num_kv_heads, block_size, head_size]."""
    shape = (2, layout.num_kv_heads, layout.block_size, layout.head_size)
    return _block_bytes(layer_arena, entry, layout).view(getattr(torch, layout.native_dtype)).view(shape)
