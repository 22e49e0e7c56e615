"""What the largest step takes besides weights and KV: estimated on a CPU, run for real on a GPU."""

import numpy as np

from kernels.formats import PLACES_PER_SLAB, Format, KVLayout, entry
from worker_svc.batch import StepBatch
from worker_svc.models.config import ModelConfig

_FLOAT_BYTES = 4


def activation_bytes(config: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """Return roughly what a forward pass over `num_tokens` with logits of `num_rows` takes, in float32."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    per_token = 2 * attention + 4 * config.hidden_size + 3 * config.intermediate_size
    logits = 3 * num_rows * config.vocab_size  # with the copies that log probabilities and random choices need
    return _FLOAT_BYTES * (num_tokens * per_token + logits)


def prefill_batch(num_tokens: int, num_sampling: int, layout: KVLayout) -> StepBatch:
    """Return one row of `num_tokens` from position 0 on, in the first blocks, with logits at its last tokens."""
    num_blocks = -(-num_tokens // layout.block_size)
    block_ids = [idx // layout.slab_blocks * PLACES_PER_SLAB + idx % layout.slab_blocks for idx in range(num_blocks)]
    entries = np.array([entry(block_id, Format.NATIVE) for block_id in block_ids], dtype=np.int32)
    positions = np.arange(num_tokens)
    offsets = positions % layout.block_size
    return StepBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slot_mapping=np.array(block_ids)[positions // layout.block_size] * layout.block_size + offsets,
        block_table=entries[None],
        context_lens=np.array([num_tokens], dtype=np.int32),
        cu_seqlens_q=np.array([0, num_tokens], dtype=np.int32),
        max_query_len=num_tokens,
        written_entries=entries.astype(np.int64),
        sampling_slots=np.zeros(num_sampling, dtype=np.int64),
        sampling_token_idxs=positions[-num_sampling:],
    )
