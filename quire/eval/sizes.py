"""What a policy saves: bytes of a sequence's KV, and the blocks that an arena holds. Reckoned, not measured."""

from dataclasses import dataclass

from kernels.formats import Format, KVLayout
from quire.eval.policies import NATIVE_POLICY
from scheduler_svc.core.precision import PrecisionPolicy
from worker_svc.arena_plan import plan_arena
from worker_svc.models.config import ModelConfig

LENGTHS_TOKENS = (2048, 8000)  # of the sequences whose bytes are told
_POOL_LENGTH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class KVShape:
    """What of a model, and of how it is served, decides bytes."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # tokens
    native_dtype: str

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: str) -> "KVShape":
        """Return a model's shape; the dtype auto is bfloat16."""
        native = "bfloat16" if dtype == "auto" else dtype
        return cls(config.num_layers, config.num_kv_heads, config.head_size, block_size, native)

    def layout(self, slab_blocks: int = 16) -> KVLayout:
        """Return the layout of one layer."""
        return KVLayout(self.num_kv_heads, self.head_size, self.block_size, self.native_dtype, slab_blocks)


def sequence_bytes(shape: KVShape, policy: PrecisionPolicy, num_tokens: int) -> int:
    """Return the bytes, in all layers, of the blocks of a sequence of so many tokens."""
    layout = shape.layout()
    counts = _count_formats(shape, policy, num_tokens)
    return shape.num_layers * sum(count * layout.block_bytes(fmt) for fmt, count in counts.items())


def native_ratio(shape: KVShape, policy: PrecisionPolicy, num_tokens: int) -> float:
    """Return how many times more bytes the sequence takes when all of it is native."""
    return sequence_bytes(shape, NATIVE_POLICY.policy, num_tokens) / sequence_bytes(shape, policy, num_tokens)


def pool_blocks(shape: KVShape, policy: PrecisionPolicy, budget_bytes: int) -> int:
    """Return how many blocks an arena holds of sequences of 2,048 tokens, each format in slabs of its own.

    Raises OutOfMemoryAtStartError when the budget is too small for any arena.
    """
    arena = plan_arena(budget_bytes, shape.num_layers, shape.layout)
    counts = _count_formats(shape, policy, _POOL_LENGTH_TOKENS)
    slabs_per_sequence = sum(count / arena.layout.blocks_per_slab(fmt) for fmt, count in counts.items() if count)
    return int(arena.num_slabs / slabs_per_sequence * sum(counts.values()))


def _count_formats(shape: KVShape, policy: PrecisionPolicy, num_tokens: int) -> dict[Format, int]:
    """Return the blocks in each format; a block that is not full is native."""
    num_full, num_left = divmod(num_tokens, shape.block_size)
    counts = {Format(code): count for code, count in enumerate(policy.count_formats(0, num_full, num_full))}
    counts[Format.NATIVE] += 1 if num_left else 0
    return counts
