"""A step's rows as the arrays that a forward pass takes, gathered from the mirror without a loop over rows.

Tokens of all rows lie one after the other (a *ragged* batch): row i's queries are `cu_seqlens_q[i]` to
`cu_seqlens_q[i + 1]`. Each step gets arrays of its own, so that nothing patched for the next step changes them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.formats import ENTRY_FORMAT_BITS, FORMAT_MASK, Format
from worker_svc.errors import MalformedStepError
from worker_svc.mirror import Mirror, ScheduledRows

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass: R rows, T tokens, S of the rows sample."""

    token_ids: Int64Array  # [T]
    positions: Int64Array  # [T]
    slot_mapping: Int64Array  # [T] where each token's KV goes: block_id * block_size + offset
    block_table: Int32Array  # [R, max_blocks] entries; what follows a row's last block is not read
    context_lens: Int32Array  # [R] tokens whose KV exists after this step's writes
    cu_seqlens_q: Int32Array  # [R + 1]
    max_query_len: int
    written_entries: Int64Array  # blocks that the forward writes to, each once
    sampling_slots: Int64Array  # [S] mirror slots of the rows that sample
    sampling_token_idxs: Int64Array  # [S] position in the batch of each one's last token


def build_batch(mirror: Mirror, rows: ScheduledRows) -> StepBatch:
    """Return the batch of at least one row. Raises MalformedStepError when a block to write is not native."""
    slots, query_lens = rows.slots, rows.num_scheduled
    block_size = mirror.limits.block_size
    num_computed = mirror.num_computed[slots]
    context_lens = num_computed + query_lens
    cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=cu_seqlens_q[1:])
    num_tokens = int(cu_seqlens_q[-1])

    row_of_token = np.repeat(np.arange(len(slots)), query_lens)
    positions = np.arange(num_tokens) + (num_computed - cu_seqlens_q[:-1])[row_of_token]
    block_table = mirror.tables[slots, : -(-int(context_lens.max()) // block_size)]
    written = block_table[row_of_token, positions // block_size].astype(np.int64)
    if (written & FORMAT_MASK != Format.NATIVE).any():
        raise MalformedStepError("a token's KV would be written to a block that is not native")

    samples = context_lens == mirror.num_tokens[slots]
    return StepBatch(
        token_ids=mirror.tokens[slots[row_of_token], positions].astype(np.int64),
        positions=positions,
        slot_mapping=(written >> ENTRY_FORMAT_BITS) * block_size + positions % block_size,
        block_table=block_table,
        context_lens=context_lens.astype(np.int32),
        cu_seqlens_q=cu_seqlens_q.astype(np.int32),
        max_query_len=int(query_lens.max()),
        written_entries=np.unique(written),
        sampling_slots=slots[samples],
        sampling_token_idxs=cu_seqlens_q[1:][samples] - 1,
    )
