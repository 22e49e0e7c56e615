"""How an arena of a given size is cut in slabs. Torch-free: the worker allocates by it, `quire plan` tells by it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format, KVLayout
from worker_svc.errors import OutOfMemoryAtStartError

if TYPE_CHECKING:
    import torch

# A pool of few slabs could serve few formats at once: small pools take smaller slabs.
MIN_SLABS = 8
SLAB_BLOCKS = 16
MIN_BLOCKS = 2
# An entry is a non-negative int32.
_MAX_SLABS = 2**31 // (PLACES_PER_SLAB << ENTRY_FORMAT_BITS)


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

    def allocate(self, device: "torch.device") -> "torch.Tensor":
        """Return the arena: uint8 zeros [num_layers, num_slabs, slab_bytes]."""
        import torch  # whoever has a device has loaded it, and whoever only plans need not

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
