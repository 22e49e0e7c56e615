"""Batches carry what a forward pass needs, at the right places."""

import numpy as np
import pytest

from protos import worker_pb2 as pb
from tests.worker.fakes import BLOCK_SIZE, PLACES_PER_SLAB, continued, entries_of, make_mirror, new_row
from worker_svc.batch import build_batch
from worker_svc.errors import MalformedStepError
from worker_svc.mirror import Mirror


def decode_and_prefill() -> Mirror:
    """Return a mirror whose row 1 has one token to decode, at position 8."""
    mirror = make_mirror()
    mirror.advance(mirror.apply(pb.StepRequest(new_rows=[new_row(1, range(10, 18), entries_of(5, 2))])))
    mirror.append_token(mirror.slot_of(1), 60)
    return mirror


def test_mixed_batch_of_a_decode_and_a_prefill_chunk() -> None:
    mirror = decode_and_prefill()
    chunk = new_row(2, range(20, 40), entries_of(0, 6, 7), num_computed=4, num_scheduled=6)
    batch = build_batch(mirror, mirror.apply(pb.StepRequest(new_rows=[chunk], continued=continued(1))))
    assert batch.token_ids.tolist() == [24, 25, 26, 27, 28, 29, 60]
    assert batch.positions.tolist() == [4, 5, 6, 7, 8, 9, 8]
    assert batch.cu_seqlens_q.tolist() == [0, 6, 7]
    assert batch.context_lens.tolist() == [10, 9]
    assert batch.max_query_len == 6
    assert batch.block_table.tolist() == [entries_of(0, 6), entries_of(5, 2)]
    # Block 6 is place 2 of slab 1 (4 blocks a slab).
    block_6 = (PLACES_PER_SLAB + 2) * BLOCK_SIZE
    assert batch.slot_mapping.tolist() == [4, 5, 6, 7, block_6, block_6 + 1, 2 * BLOCK_SIZE]
    assert batch.written_entries.tolist() == sorted(entries_of(0, 6, 2))
    for array in (batch.block_table, batch.context_lens, batch.cu_seqlens_q):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


def test_only_rows_that_reach_their_last_token_sample() -> None:
    mirror = decode_and_prefill()
    chunk = new_row(2, range(20, 40), entries_of(0, 6, 7), num_computed=4, num_scheduled=6)
    batch = build_batch(mirror, mirror.apply(pb.StepRequest(new_rows=[chunk], continued=continued(1))))
    assert [mirror.seq_ids[slot] for slot in batch.sampling_slots] == [1]
    assert batch.sampling_token_idxs.tolist() == [6]


def test_batch_is_not_changed_by_the_next_steps_patches() -> None:
    mirror = decode_and_prefill()
    batch = build_batch(mirror, mirror.apply(pb.StepRequest(continued=continued(1))))
    before = (batch.block_table.copy(), batch.token_ids.copy(), batch.context_lens.copy())
    mirror.clear()
    mirror.apply(pb.StepRequest(new_rows=[new_row(9, [1] * 16, entries_of(7, 7))]))
    assert np.array_equal(batch.block_table, before[0])
    assert np.array_equal(batch.token_ids, before[1])
    assert np.array_equal(batch.context_lens, before[2])


def test_writing_to_a_block_that_is_not_native_is_refused() -> None:
    mirror = decode_and_prefill()
    rows = mirror.apply(pb.StepRequest(continued=continued(1)))
    mirror.tables[mirror.slot_of(1), 1] += 3
    with pytest.raises(MalformedStepError, match="not native"):
        build_batch(mirror, rows)
