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


def prefill_slabs(num_tokens: int, num_rows: int, max_row_tokens: int, layout: KVLayout) -> int:
    """Return the slabs that `prefill_batch` writes to."""
    num_blocks = -(-_query_lens(num_tokens, num_rows, max_row_tokens) // layout.block_size)
    return -(-int(num_blocks.sum()) // layout.slab_blocks)


def prefill_batch(num_tokens: int, num_rows: int, max_row_tokens: int, max_blocks: int, layout: KVLayout) -> StepBatch:
    """Return rows from position 0 on that all sample, with tables of `max_blocks`, in the arena's first blocks.

    The first are as long as `max_row_tokens` allows, those behind them have a single token, as decodes have.
    """
    query_lens = _query_lens(num_tokens, num_rows, max_row_tokens)
    num_blocks = -(-query_lens // layout.block_size)
    rows = np.repeat(np.arange(num_rows), query_lens)
    cu_seqlens_q = np.concatenate(([0], np.cumsum(query_lens)))
    positions = np.arange(num_tokens) - cu_seqlens_q[rows]
    block_ids = _block_ids(int(num_blocks.sum()), layout)
    table = np.zeros((num_rows, max_blocks), dtype=np.int64)
    table[np.arange(max_blocks) < num_blocks[:, None]] = block_ids
    return StepBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=positions,
        slot_mapping=table[rows, positions // layout.block_size] * layout.block_size + positions % layout.block_size,
        block_table=_entries(table),
        context_lens=query_lens.astype(np.int32),
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        max_query_len=int(query_lens.max()),
        written_entries=_entries(block_ids).astype(np.int64),
        sampling_slots=np.arange(num_rows),
        sampling_token_idxs=cu_seqlens_q[1:] - 1,
    )


def _query_lens(num_tokens: int, num_rows: int, max_row_tokens: int) -> npt.NDArray[np.int64]:
    """Return the tokens of each row: one, and what is left of `num_tokens` in the first rows."""
    assert num_rows <= num_tokens <= num_rows * max_row_tokens
    left = num_tokens - num_rows - (max_row_tokens - 1) * np.arange(num_rows)
    return 1 + np.clip(left, 0, max_row_tokens - 1)


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
