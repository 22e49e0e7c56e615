"""What the largest step takes besides weights and KV: estimated on a CPU, run for real on a GPU."""

import numpy as np
import numpy.typing as npt

from kernels.formats import ENTRY_FORMAT_BITS, PLACES_PER_SLAB, Format, KVLayout
from worker_svc.batch import StepBatch
from worker_svc.models.config import ModelConfig

_FLOAT_BYTES = 4


def activation_bytes(config: ModelConfig, num_tokens: int, num_rows: int) -> int:
    """Return roughly what a forward pass over `num_tokens` with logits of `num_rows` takes, in float32."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
    per_token = 2 * attention + 4 * config.hidden_size + 3 * config.intermediate_size
    logits = 3 * num_rows * config.vocab_size  # with the copies that log probabilities and random choices need
    return _FLOAT_BYTES * (num_tokens * per_token + logits)


def prefill_slabs(num_tokens: int, max_row_tokens: int, layout: KVLayout) -> int:
    """Return the slabs that `prefill_batch` writes to."""
    full_rows, rest = divmod(num_tokens, max_row_tokens)
    num_blocks = full_rows * -(-max_row_tokens // layout.block_size) + -(-rest // layout.block_size)
    return -(-num_blocks // layout.slab_blocks)


def prefill_batch(num_tokens: int, max_row_tokens: int, num_sampling: int, layout: KVLayout) -> StepBatch:
    """Return rows of `max_row_tokens` from position 0 on, the last one of what is left of `num_tokens`.

    They lie in the first blocks; logits are those of the batch's last `num_sampling` tokens.
    """
    query_lens = np.full(-(-num_tokens // max_row_tokens), max_row_tokens)
    query_lens[-1] -= query_lens.sum() - num_tokens
    num_blocks = -(-query_lens // layout.block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    rows = np.repeat(np.arange(len(query_lens)), query_lens)
    cu_seqlens_q = np.concatenate(([0], np.cumsum(query_lens)))
    positions = np.arange(num_tokens) - cu_seqlens_q[rows]
    block_ids = _block_ids(int(num_blocks.sum()), layout)
    table = block_ids[np.minimum(first_blocks[:, None] + np.arange(num_blocks.max()), len(block_ids) - 1)]
    entries = _entries(table)
    return StepBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slot_mapping=table[rows, positions // layout.block_size] * layout.block_size + positions % layout.block_size,
        block_table=entries,
        context_lens=query_lens.astype(np.int32),
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        max_query_len=int(query_lens.max()),
        written_entries=_entries(block_ids).astype(np.int64),
        sampling_slots=np.zeros(num_sampling, dtype=np.int64),
        sampling_token_idxs=np.arange(num_tokens)[-num_sampling:],
    )


def decode_batch(num_rows: int, max_blocks: int, layout: KVLayout) -> StepBatch:
    """Return rows that decode their first token, with tables as wide as the longest sequence's.

    Row i writes to slot i: they share the first blocks.
    """
    rows = np.arange(num_rows)
    block_ids = _block_ids(-(-num_rows // layout.block_size), layout)[rows // layout.block_size]
    table = np.zeros((num_rows, max_blocks), dtype=np.int32)
    table[:, 0] = _entries(block_ids)
    return StepBatch(
        token_ids=np.zeros(num_rows, dtype=np.int64),
        positions=np.zeros(num_rows, dtype=np.int64),
        slot_mapping=block_ids * layout.block_size + rows % layout.block_size,
        block_table=table,
        context_lens=np.ones(num_rows, dtype=np.int32),
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
        max_query_len=1,
        written_entries=np.unique(table[:, 0]).astype(np.int64),
        sampling_slots=rows,
        sampling_token_idxs=rows,
    )


def _block_ids(num_blocks: int, layout: KVLayout) -> npt.NDArray[np.int64]:
    """Return the ids of the arena's first native blocks."""
    slabs, places = np.divmod(np.arange(num_blocks), layout.slab_blocks)
    return slabs * PLACES_PER_SLAB + places


def _entries(block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    return (block_ids << ENTRY_FORMAT_BITS | Format.NATIVE).astype(np.int32)
