"""How many bytes the KV arena may take in main memory, and whether weights fit. `arena_plan.py` cuts it in slabs.

On a CPU the arena takes what `--kv-cache-memory` says; on a GPU what else is needed leaves it (`gpu_memory.py`).
"""

import logging
from pathlib import Path

import torch

from worker_svc.errors import OutOfMemoryAtStartError

logger = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1024**3

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# Of version 2 and version 1: the limit, what is used, and of what kind that is.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


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
    """Raise OutOfMemoryAtStartError when that much of a model's weights, still to be loaded, cannot be."""
    free_bytes = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if weight_bytes > free_bytes:
        raise OutOfMemoryAtStartError("loading the model's weights", weight_bytes, free_bytes, "take a smaller model")


def free_host_bytes() -> int:
    """Return the main memory that this process may still take: of the machine, or of its container if that is less."""
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for names in _CGROUP_FILES:
        limit, used, kinds = (_CGROUP / name for name in names)
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            # Pages of files count as used, and are given back when memory runs short.
            stat = dict(line.split() for line in kinds.read_text().splitlines())
            free = min(free, int(text) - int(used.read_text()) + int(stat["inactive_file"]) + int(stat["active_file"]))
    return free
