"""The operations on the paged KV cache, as every backend offers them, and which backend serves a device.

An arena is a contiguous uint8 tensor [num_layers, num_slabs, slab_bytes]; a layer's arena is `arena[layer]`. How the
elements of a block are ordered is the backend's own business: only the backend that wrote an arena can read it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kernels.errors import UnsupportedDeviceError
from kernels.formats import Format, KVLayout


@dataclass(slots=True)
class AttentionBatch:
    """One ragged batch of prefill chunks and decodes. All tensors are int32, contiguous, on the arena's device.

    Query i of a row is the token at position context_len - query_len + i, and sees the keys up to that position. A row
    may have no query at all.
    """

    block_table: Tensor  # [num_rows, max_blocks] entries; those beyond a row's context are never read
    context_lens: Tensor  # [num_rows] tokens whose KV exists after this step's write_kv
    cu_seqlens_q: Tensor  # [num_rows + 1] where each row's query tokens begin and end
    max_query_len: int  # tokens


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer's attention computes: softmax(soft_cap * tanh(scale * q.k / soft_cap)) over the window's keys."""

    scale: float
    sliding_window: int | None = None  # keys that a query sees, itself included; None: all
    soft_cap: float | None = None  # None: scores go uncapped


class Backend(Protocol):
    """The operations of one device. Launches of one backend come one after the other, from one thread at a time.

    A backend whose device works on its own time cannot see what stands in tensors without waiting for it. It checks
    shapes, dtypes and strides, and says in its docstring what becomes of a wrong slot, entry or length; it never reads
    or writes outside the tensors that it was given. Its batches may be padded to fixed shapes (a captured graph's): a
    slot of -1 is skipped, and a row with context length 0 gets zeros in `out`, whatever its query length.
    """

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        """Write the keys and values of new tokens into native blocks of one layer, rounded to the native dtype.

        Args:
            layer_arena: uint8 [num_slabs, slab_bytes]; written.
            key, value: [num_tokens, num_kv_heads, head_size], float32, bfloat16 or float16; the last dimension
                contiguous.
            slot_mapping: int64 [num_tokens], contiguous; the slot of each token, no slot twice.
            layout: of the arena.

        Raises:
            OutOfArenaError: a slot lies outside the arena; what was written until then stays.
            UnsupportedShapeError: the backend has no kernel for the layout or a tensor's dtype or strides.
        """

    def paged_attention(
        self,
        query: Tensor,
        layer_arena: Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
        layout: KVLayout,
        out: Tensor,
    ) -> None:
        """Attend from every query token to the keys and values of its row, with float32 accumulation.

        Args:
            query: [num_tokens, num_query_heads, head_size], float32, bfloat16 or float16; the last two dimensions
                contiguous. Query heads h * G .. h * G + G - 1 share KV head h.
            layer_arena: uint8 [num_slabs, slab_bytes].
            batch: which tokens belong to which row, and where its blocks are.
            params: scale, window, soft cap.
            layout: of the arena.
            out: as query, of any of the three dtypes; written.

        Raises:
            UnsupportedFormatError: an entry's format has no kernel; `out` is then undefined.
            OutOfArenaError: an entry names a place outside the arena; `out` is then undefined.
            InvalidBatchError: a row's lengths contradict each other, its table or the query; nothing is written.
            UnsupportedShapeError: the backend has no kernel for the layout, the head counts, a dtype or strides.
        """

    def requantize_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """Write full blocks of all layers anew in narrower formats: int32 [n] entries to int32 [n] entries.

        A source may have any format, its destination any of a higher code. Keys (or values) whose codec is the same
        in both formats are copied. Otherwise the source's become float32 numbers x; each group (the x of one head and
        token, or of one head and channel over the block) becomes codes with a scale and, but for fp8, a minimum:

            x        = 0 where NaN, else clamped to +-65504, float16's largest
            minimum  = the largest float16 <= min(x)
            scale    = the smallest float16 >= (max(x) - minimum) / levels       levels: 255 (int8), 15 (int4)
            code     = round((x - minimum) / scale), 0 where scale is 0          ties to even

            scale    = the smallest float16 >= max(|x|) / 448                    fp8
            code     = float8_e4m3fn(x / scale), 0 where scale is 0              ties to even

        in float32, each operation rounded once. So a constant group comes back as it was, to the last bit where
        float16 has its number, and any finite x within 65504 within half a scale of int8 or int4, however far from
        zero the group lies. Tiny groups do not vanish: scales begin at 2^-24. NaN, infinite and huge numbers cost their
        own group its precision, and no other: what attention reads of a block that is not native is always finite.

        No destination is named twice or is a source. Nothing is written when an error is raised.

        Raises:
            UnsupportedFormatError: an entry's format has no kernel, or a destination's code is not above its source's.
            OutOfArenaError: an entry names a place outside the arena.
        """

    def copy_blocks(self, arena: Tensor, src_entries: Tensor, dst_entries: Tensor, layout: KVLayout) -> None:
        """Copy blocks of all layers: int32 [n] entries to int32 [n] entries of the same formats.

        No destination is named twice or is a source. Nothing is written when an error is raised.

        Raises:
            UnsupportedFormatError: an entry's format has no kernel, or source and destination differ in format.
            OutOfArenaError: an entry names a place outside the arena.
        """

    def zero_blocks(self, arena: Tensor, entries: Tensor, layout: KVLayout) -> None:
        """Fill blocks of all layers, int32 [n] entries, with zeros. Raises as copy_blocks."""

    def warm_up(
        self,
        layout: KVLayout,
        num_query_heads: int,
        params: AttentionParams,
        formats: Collection[Format] = (Format.NATIVE,),
    ) -> None:
        """Compile, or load from the cache, every kernel that such a model needs with blocks of the formats.

        Later launches never compile, but for the first that meets a block of another format.
        """


def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device, the same one every time; raises UnsupportedDeviceError when there is none."""
    return _backend_of_type(device.type)


@cache
def _backend_of_type(device_type: str) -> Backend:
    if device_type == "cpu":
        from kernels.cpu.backend import CpuBackend  # here, because it loads Numba

        return CpuBackend()
    if device_type == "cuda":  # torch's name for AMD's GPUs too
        try:
            from kernels.triton.backend import TritonBackend  # here, because it loads the compiler
        except ModuleNotFoundError as error:
            raise UnsupportedDeviceError(f"the kernels for GPUs need the package {error.name!r}") from error
        return TritonBackend()
    raise UnsupportedDeviceError(
        f"no attention kernels for device type {device_type!r}: only 'cpu' and 'cuda' are served"
    )
