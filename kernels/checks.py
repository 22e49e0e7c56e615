"""What backends check of the tensors that they are given, before they hand addresses to compiled code."""

import torch
from torch import Tensor

from kernels.errors import UnsupportedShapeError
from kernels.formats import KVLayout


def describe(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape, for messages."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_integers(tensor: Tensor, dtype: torch.dtype, num_elements: int, name: str) -> None:
    """Raise UnsupportedShapeError unless a tensor is contiguous, of the dtype and as large."""
    if tensor.dtype != dtype or tensor.numel() != num_elements or not tensor.is_contiguous():
        raise UnsupportedShapeError(f"{name} is {describe(tensor)}, not {num_elements} contiguous elements of {dtype}")


def check_key_value(key: Tensor, value: Tensor, layout: KVLayout) -> None:
    """Raise UnsupportedShapeError unless key and value are alike, of the layout, their last dimension contiguous."""
    shape = (layout.num_kv_heads, layout.head_size)
    if key.shape[1:] != shape or value.shape != key.shape or value.dtype != key.dtype:
        raise UnsupportedShapeError(f"key is {describe(key)}, value {describe(value)}: not both [tokens, {shape}]")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise UnsupportedShapeError("the last dimension of key or value is not contiguous")


def check_query_out(query: Tensor, out: Tensor, head_size: int) -> None:
    """Raise UnsupportedShapeError unless query and out are alike, and contiguous in the last two dimensions."""
    if out.shape != query.shape or query.shape[2] != head_size:
        raise UnsupportedShapeError(f"query is {describe(query)}, out {describe(out)}, the head size {head_size}")
    if query.stride()[1:] != (head_size, 1) or out.stride()[1:] != (head_size, 1):
        raise UnsupportedShapeError("the last two dimensions of query or out are not contiguous")


def group_size(num_query_heads: int, layout: KVLayout, sliding_window: int | None) -> int:
    """Return the query heads that share a KV head; raises UnsupportedShapeError on what no attention can mean."""
    if num_query_heads % layout.num_kv_heads != 0:
        raise UnsupportedShapeError(f"{num_query_heads} query heads cannot share {layout.num_kv_heads} KV heads evenly")
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedShapeError(f"sliding_window is {sliding_window}, not at least 1")
    return num_query_heads // layout.num_kv_heads
