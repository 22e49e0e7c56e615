"""The reckoning: what is left for KV, how it is cut, and how many sequences that holds in each format.

    sequences = (memory * utilization - weights) / (KV bytes of a token * mean length)

is an upper bound. Blocks lie whole in slabs of one format, and of a sequence the first block, the newest full one and
the one being filled are native in every policy: `num_sequences_in_blocks` counts so. What a worker measures when it
starts (activations, graphs, the driver) and the blocks that a scheduler keeps in reserve are taken off neither.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kernels.formats import Format, KVLayout
from worker_svc.arena_plan import ArenaPlan, plan_arena
from worker_svc.errors import OutOfMemoryAtStartError, StartupError
from worker_svc.plan.settings import PlanSettings
from worker_svc.plan.shape import ModelShape

NATIVE_FULL_BLOCKS = 2  # of a sequence: the first and the newest


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left for KV of a device's memory."""

    memory_bytes: int
    utilization: float  # share of it that may be taken
    weight_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights and KV together."""
        return int(self.memory_bytes * self.utilization)

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV."""
        return self.usable_bytes - self.weight_bytes


@dataclass(frozen=True, slots=True)
class FormatPlan:
    """What a device's memory holds when KV is kept in one format."""

    fmt: Format
    budget: Budget
    arena: ArenaPlan

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers."""
        return self.arena.layout.block_bytes(self.fmt) * self.arena.num_layers

    @property
    def token_bytes(self) -> float:
        """Bytes of a token, all layers, its share of the block's scales included."""
        return self.block_bytes / self.arena.layout.block_size

    @property
    def native_share(self) -> float:
        """Bytes against those of native KV."""
        layout = self.arena.layout
        return layout.block_bytes(self.fmt) / layout.block_bytes(Format.NATIVE)

    @property
    def blocks_per_slab(self) -> int:
        """Blocks that a slab holds."""
        return self.arena.places_per_slab[self.fmt]

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool holds if every slab has this format."""
        return self.arena.num_slabs * self.blocks_per_slab

    def sequence_bytes(self, num_tokens: int) -> float:
        """Return the bytes of a sequence's KV."""
        return self.token_bytes * num_tokens

    def num_sequences(self, num_tokens: int) -> int:
        """Return how many sequences of a mean length fit, by bytes alone."""
        return self.budget.kv_bytes * self.arena.layout.block_size // (self.block_bytes * num_tokens)

    def num_sequences_in_blocks(self, num_tokens: int) -> int:
        """Return how many sequences of this very length fit in whole blocks, each with its native ones."""
        full, rest_tokens = divmod(num_tokens, self.arena.layout.block_size)
        blocks = full + (rest_tokens > 0)
        num_native = blocks - full + min(NATIVE_FULL_BLOCKS, full)
        if self.fmt is Format.NATIVE:
            return self.num_blocks // blocks

        def num_slabs(num_sequences: int) -> int:
            native = -(-num_sequences * num_native // self.arena.places_per_slab[Format.NATIVE])
            return native - (-num_sequences * (blocks - num_native) // self.blocks_per_slab)

        # A slab of the smallest pools is one native block, which a format of more bytes does not fit in.
        most = max(self.num_blocks, self.arena.num_blocks) // blocks if self.blocks_per_slab else 0
        return bisect_left(range(1, most + 1), self.arena.num_slabs + 1, key=num_slabs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a device's memory holds of a model's KV, format by format."""

    shape: ModelShape
    budget: Budget
    arena: ArenaPlan
    mean_length_tokens: int

    @property
    def formats(self) -> list[FormatPlan]:
        """A plan for each format that there is."""
        return [FormatPlan(fmt, self.budget, self.arena) for fmt in Format]


def plan_memory(settings: PlanSettings, shape: ModelShape) -> MemoryPlan:
    """Return the plan. Raises StartupError, or OutOfMemoryAtStartError with bytes needed and bytes there are."""
    if shape.max_model_len is not None and settings.mean_length > shape.max_model_len:
        raise StartupError(
            f"--mean-length {settings.mean_length}: {shape.name} was made for {shape.max_model_len} tokens"
        )
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype

    def layout_of(slab_blocks: int) -> KVLayout:
        return KVLayout(shape.num_kv_heads, shape.head_size, settings.block_size, dtype, slab_blocks)

    weight_bytes = settings.weights_memory or (shape.num_parameters or 0) * layout_of(1).element_bytes
    budget = _budget(settings, weight_bytes)
    arena = plan_arena(budget.kv_bytes, shape.num_layers, layout_of)
    return MemoryPlan(shape, budget, arena, settings.mean_length)


def _budget(settings: PlanSettings, weight_bytes: int) -> Budget:
    if settings.kv_cache_memory is not None:
        return Budget(settings.kv_cache_memory, utilization=1.0, weight_bytes=0)
    assert settings.memory is not None, "one of both is given"
    budget = Budget(settings.memory, settings.gpu_memory_utilization, weight_bytes)
    if budget.kv_bytes < 0:
        raise OutOfMemoryAtStartError(
            "holding the model's weights",
            weight_bytes,
            budget.usable_bytes,
            "raise --memory or --gpu-memory-utilization",
        )
    return budget
