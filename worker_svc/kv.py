"""The KV arena: how many bytes it may take, how they are cut into slabs, and its allocation.

On a CPU the arena takes what `--kv-cache-memory` says; on a GPU what else is needed leaves it (`gpu_memory.py`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format, KVLayout
from worker_svc.errors import OutOfMemoryAtStartError

logger = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1024**3
# A pool of few slabs could serve few formats at once: small pools take smaller slabs.
MIN_SLABS = 8
SLAB_BLOCKS = 16
MIN_BLOCKS = 2
# An entry is a non-negative int32.
_MAX_SLABS = 2**31 // (PLACES_PER_SLAB << ENTRY_FORMAT_BITS)

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """How an arena is cut."""

    num_layers: int
    num_slabs: int
    layout: KVLayout

    @property
    def num_blocks(self) -> int:
        """Native blocks."""
        return self.num_slabs * self.layout.slab_blocks

    @property
    def places_per_slab(self) -> dict[Format, int]:
        """Blocks a slab holds, for each format."""
        return {fmt: self.layout.blocks_per_slab(fmt) for fmt in Format}

    @property
    def num_tokens(self) -> int:
        """Tokens whose native KV fits."""
        return self.num_blocks * self.layout.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers."""
        return self.num_layers * self.num_slabs * self.layout.slab_bytes

    def allocate(self, device: torch.device) -> Tensor:
        """Return the arena: uint8 zeros [num_layers, num_slabs, slab_bytes]."""
        return torch.zeros(self.num_layers, self.num_slabs, self.layout.slab_bytes, dtype=torch.uint8, device=device)


def plan_arena(budget_bytes: int, num_layers: int, layout_of: Callable[[int], KVLayout]) -> ArenaPlan:
    """Return the largest arena within a budget; `layout_of` gives the layout for a number of native blocks a slab.

    Raises OutOfMemoryAtStartError when not even MIN_BLOCKS blocks fit.
    """
    block_bytes = layout_of(1).block_bytes(Format.NATIVE) * num_layers
    num_blocks = budget_bytes // block_bytes
    if num_blocks < MIN_BLOCKS:
        raise OutOfMemoryAtStartError(
            f"a KV arena of {MIN_BLOCKS} blocks", MIN_BLOCKS * block_bytes, max(budget_bytes, 0), "give it more memory"
        )
    slab_blocks = SLAB_BLOCKS
    while slab_blocks > 1 and num_blocks // slab_blocks < MIN_SLABS:
        slab_blocks //= 2
    return ArenaPlan(num_layers, min(num_blocks // slab_blocks, _MAX_SLABS), layout_of(slab_blocks))


def cpu_budget(asked_bytes: int | None, reserve_bytes: int) -> int:
    """Return the bytes for an arena in main memory, of which a step's activations need `reserve_bytes` more.

    An explicit wish is met or refused (OutOfMemoryAtStartError); the default shrinks to half of what is free.
    """
    free_bytes = free_host_bytes()
    if asked_bytes is None:
        budget = min(DEFAULT_CPU_BYTES, (free_bytes - reserve_bytes) // 2)
        if budget < DEFAULT_CPU_BYTES:
            logger.warning(
                "KV arena: %d bytes instead of %d, for only %d are free", budget, DEFAULT_CPU_BYTES, free_bytes
            )
        return budget
    if asked_bytes + reserve_bytes > free_bytes:
        raise OutOfMemoryAtStartError(
            f"a KV arena of {asked_bytes:,} bytes with the activations of a step",
            asked_bytes + reserve_bytes,
            free_bytes,
            "lower --kv-cache-memory",
        )
    return asked_bytes


def check_weights_fit(weight_bytes: int, device: torch.device) -> None:
    """Raise OutOfMemoryAtStartError when weights of that size cannot be loaded."""
    free_bytes = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if weight_bytes > free_bytes:
        raise OutOfMemoryAtStartError("loading the model's weights", weight_bytes, free_bytes, "take a smaller model")


def free_host_bytes() -> int:
    """Return the main memory that this process may still take: of the machine, or of its container if that is less."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        # Pages of files count as used, and are given back when memory runs short.
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, int(text) - int(used.read_text()) + int(stat["inactive_file"]) + int(stat["active_file"]))
    return free
