"""Tile sizes, warps and pipeline stages of the attention kernels, by chip and by the bytes of a key.

Chosen from what the compiler reports (`kernels.triton.report`): the widest tiles that spill no register, with two tiles
of keys and values on their way to shared memory while one is multiplied. Chips of one generation with less shared
memory (those in desktops) get a shorter pipeline. Codes become numbers in registers, so kernels that read other formats
than native get smaller tiles, but for products that take their operands from shared memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kernels.dispatch import AttentionParams
from kernels.formats import Format, KVLayout

# Of every launch. The compiler's default is about to change; products and sums are the same to the last bit only with
# one setting.
COMPILER_OPTIONS: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
# CUDA architectures with 99 KiB of shared memory for a program; the others from 80 on have 163 KiB or more.
_SMALL_SHARED = (86, 89, 120, 121)
_DECODE_TILE_BYTES = 16384  # of keys


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as Triton names it: ("cuda", 90), ("hip", "gfx942")."""

    backend: str
    arch: int | str

    @property
    def has_async_products(self) -> bool:
        """Whether tensor cores read their operands from shared memory on their own: Hopper and Blackwell."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 90 and not self.has_small_shared

    @property
    def has_small_shared(self) -> bool:
        """Whether a program may use 99 KiB of shared memory at most."""
        return self.backend == "hip" or self.arch in _SMALL_SHARED


@dataclass(frozen=True, slots=True)
class Tuning:
    """How one attention kernel is cut."""

    rows: int  # of a product: query tokens x query heads of a KV head
    keys: int  # tokens of a tile
    num_warps: int
    num_stages: int


def head_pad(layout: KVLayout) -> int:
    """Return the elements that a head takes in registers: the next power of 2."""
    return _next_power_of_2(layout.head_size)


def tune_prefill(
    layout: KVLayout, group: int, params: AttentionParams, chip: Chip, formats: Collection[Format] = (Format.NATIVE,)
) -> Tuning:
    """Return the tuning of the prefill kernel for `group` query heads a KV head, and blocks of the formats."""
    key_bytes = head_pad(layout) * layout.element_bytes
    if _has_codes(formats) and not chip.has_async_products:
        rows = max(64, _next_power_of_2(group))
        return Tuning(rows, 32 if key_bytes <= 256 else 16, num_warps=4, num_stages=2 if chip.backend == "hip" else 3)
    if layout.native_dtype == "float32":
        return _tune_float32_prefill(key_bytes, group, chip)
    rows = max(64 if key_bytes > 256 else 128, _next_power_of_2(group))
    if chip.backend == "hip":
        return Tuning(rows, 16 if key_bytes > 256 else 32, num_warps=4, num_stages=2)
    if chip.has_async_products:
        keys = {128: 128, 256: 64}.get(key_bytes, 32)
    else:
        # Products come from registers there, and masks of every tile take what 64 wide keys would need.
        masked = params.sliding_window is not None or layout.head_size != head_pad(layout)
        keys = 32 if key_bytes > 256 or (key_bytes == 256 and masked) else 64
    return Tuning(rows, keys, num_warps=8, num_stages=4 if chip.has_async_products or chip.has_small_shared else 5)


def _tune_float32_prefill(key_bytes: int, group: int, chip: Chip) -> Tuning:
    """Return small tiles: without tensor cores, a product takes many registers."""
    rows, keys, num_warps = (64, 32, 8) if key_bytes <= 256 else (16, 16, 4)
    rows = max(rows, _next_power_of_2(group))
    return Tuning(rows, keys, num_warps, num_stages=2 if chip.backend == "hip" else 3)


def tune_decode(layout: KVLayout, group: int, chip: Chip, formats: Collection[Format] = (Format.NATIVE,)) -> Tuning:
    """Return the tuning of the decode kernel; tensor cores multiply 16 rows at least."""
    rows = max(16, _next_power_of_2(group))
    keys = max(16, min(_DECODE_TILE_BYTES // (head_pad(layout) * layout.element_bytes), 128))
    if _has_codes(formats):
        keys = min(keys, 32)
    if chip.backend == "hip":
        return Tuning(rows, min(keys, 64), num_warps=4, num_stages=2)
    return Tuning(rows, keys, num_warps=4, num_stages=5)


def _has_codes(formats: Collection[Format]) -> bool:
    return any(fmt is not Format.NATIVE for fmt in formats)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
