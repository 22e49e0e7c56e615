"""The mirror follows a step's deltas in the contract's order."""

import pytest

from protos import worker_pb2 as pb
from tests.worker.fakes import VOCAB_SIZE, continued, entries_of, entry_of, make_mirror, new_row
from worker_svc.errors import MalformedStepError
from worker_svc.mirror import Mirror


def tokens(mirror: Mirror, seq_id: int) -> list[int]:
    slot = mirror.slot_of(seq_id)
    return [int(token_id) for token_id in mirror.tokens[slot, : mirror.num_tokens[slot]]]


def table(mirror: Mirror, seq_id: int) -> list[int]:
    slot = mirror.slot_of(seq_id)
    return [int(entry) for entry in mirror.tables[slot, : mirror.num_blocks[slot]]]


def add(mirror: Mirror, *rows: pb.NewRow) -> None:
    scheduled = mirror.apply(pb.StepRequest(new_rows=rows))
    assert not scheduled.failed
    mirror.advance(scheduled)


def test_new_row_brings_tokens_table_and_progress() -> None:
    mirror = make_mirror()
    rows = mirror.apply(pb.StepRequest(new_rows=[new_row(7, range(10), entries_of(3, 5), num_scheduled=6)]))
    assert tokens(mirror, 7) == list(range(10))
    assert table(mirror, 7) == entries_of(3, 5)
    assert rows.num_scheduled.tolist() == [6]
    mirror.advance(rows)
    assert mirror.num_computed[rows.slots].tolist() == [6]


def test_parts_are_applied_in_the_order_of_the_fields() -> None:
    mirror = make_mirror(max_num_seqs=2)
    add(mirror, new_row(1, [5] * 8, entries_of(0)), new_row(2, [6] * 8, entries_of(1)))
    for seq_id in (1, 2):
        mirror.append_token(mirror.slot_of(seq_id), 9)
    rows = mirror.apply(
        pb.StepRequest(
            finished_seq_ids=[1],
            new_rows=[new_row(3, [7] * 9, entries_of(2, 3))],  # takes the slot that row 1 left
            patches=pb.EntryPatches(seq_ids=[2, 3], block_idxs=[0, 1], entries=entries_of(4, 5)),
            continued=pb.ContinuedRows(seq_ids=[2], num_new_entries=[1], new_entries=entries_of(6)),
        )
    )
    assert len(mirror) == 2
    assert table(mirror, 2) == entries_of(4, 6)
    assert table(mirror, 3) == entries_of(2, 5)
    assert [mirror.seq_ids[slot] for slot in rows.slots] == [3, 2]


def test_resumed_row_keeps_its_tokens_up_to_the_known_ones() -> None:
    mirror = make_mirror()
    add(mirror, new_row(1, range(8), entries_of(0)))
    slot = mirror.slot_of(1)
    mirror.append_token(slot, 40)
    mirror.append_token(slot, 41)  # sampled by a step whose result the scheduler had given up
    resumed = pb.ResumedRow(seq_id=1, seq_epoch=1, num_tokens=9, entries=entries_of(6, 7), num_scheduled_tokens=9)
    rows = mirror.apply(pb.StepRequest(resumed_rows=[resumed]))
    assert tokens(mirror, 1) == [*range(8), 40]
    assert table(mirror, 1) == entries_of(6, 7)
    assert mirror.num_computed[slot] == 0
    assert mirror.seq_epochs[slot] == 1
    assert rows.num_scheduled.tolist() == [9]


def test_row_resumed_with_tokens_that_are_not_here_fails_alone() -> None:
    mirror = make_mirror()
    add(mirror, new_row(1, range(8), entries_of(0)))
    resumed = [
        pb.ResumedRow(seq_id=1, seq_epoch=4, num_tokens=9, entries=entries_of(6, 7), num_scheduled_tokens=9),
        pb.ResumedRow(seq_id=5, seq_epoch=2, num_tokens=1, entries=entries_of(1), num_scheduled_tokens=1),
    ]
    rows = mirror.apply(pb.StepRequest(resumed_rows=resumed))
    assert [(row.seq_id, row.seq_epoch) for row in rows.failed] == [(1, 4), (5, 2)]
    assert len(rows.slots) == 0


def test_scheduler_picks_a_token_in_place_of_the_sampled_one() -> None:
    mirror = make_mirror()
    add(mirror, new_row(1, range(7), entries_of(0)))
    mirror.append_token(mirror.slot_of(1), 40)
    mirror.apply(pb.StepRequest(continued=pb.ContinuedRows(seq_ids=[1], token_seq_ids=[1], token_ids=[50])))
    assert tokens(mirror, 1) == [*range(7), 50]


def test_failed_row_is_left_out_until_it_is_sent_anew() -> None:
    mirror = make_mirror()
    add(mirror, new_row(1, range(7), entries_of(0)), new_row(2, range(7), entries_of(1)))
    for seq_id in (1, 2):
        mirror.append_token(mirror.slot_of(seq_id), 3)
    failed = mirror.fail(mirror.slot_of(1), "for a test")
    assert (failed.seq_id, failed.error) == (1, "for a test")
    rows = mirror.apply(pb.StepRequest(continued=continued(1, 2)))
    assert [mirror.seq_ids[slot] for slot in rows.slots] == [2]
    assert rows.failed == []
    rows = mirror.apply(pb.StepRequest(new_rows=[new_row(1, range(7), entries_of(2), seq_epoch=1)]))
    assert [mirror.seq_ids[slot] for slot in rows.slots] == [1]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (new_row(1, [VOCAB_SIZE], entries_of(0)), "vocabulary"),
        (new_row(1, [], []), "0 tokens"),
        (new_row(1, [2] * 65, entries_of(*range(9))), "65 tokens"),
        (new_row(1, range(9), entries_of(0)), "1 blocks"),
        (new_row(1, range(4), entries_of(0), num_scheduled=5), "5 tokens are scheduled"),
        (new_row(1, range(4), entries_of(0), num_scheduled=0), "0 tokens are scheduled"),
    ],
)
def test_row_that_cannot_be_computed_fails_alone(row: pb.NewRow, reason: str) -> None:
    mirror = make_mirror()
    rows = mirror.apply(pb.StepRequest(new_rows=[row, new_row(2, [3], entries_of(9))]))
    assert [mirror.seq_ids[slot] for slot in rows.slots] == [2]
    assert [failed.seq_id for failed in rows.failed] == [1]
    assert reason in rows.failed[0].error


def test_sampling_parameters_outside_the_vocabulary_fail_the_row() -> None:
    mirror = make_mirror()
    row = new_row(1, [3], entries_of(0))
    row.sampling.stop_token_ids.append(VOCAB_SIZE)
    assert "stop_token_ids" in mirror.apply(pb.StepRequest(new_rows=[row])).failed[0].error


@pytest.mark.parametrize(
    "request_",
    [
        pb.StepRequest(continued=continued(99)),
        pb.StepRequest(patches=pb.EntryPatches(seq_ids=[1], block_idxs=[1], entries=entries_of(0))),
        pb.StepRequest(patches=pb.EntryPatches(seq_ids=[1], block_idxs=[0], entries=[entry_of(0) + 7])),
        pb.StepRequest(new_rows=[new_row(2, [3], [32 << 11])]),
        pb.StepRequest(new_rows=[new_row(2, [3], [4 << 3])]),
        pb.StepRequest(new_rows=[new_row(1, [3], entries_of(0))], continued=continued(1)),
        pb.StepRequest(continued=pb.ContinuedRows(seq_ids=[1], num_scheduled_tokens=[1, 1])),
        pb.StepRequest(continued=pb.ContinuedRows(seq_ids=[1], token_seq_ids=[1], token_ids=[VOCAB_SIZE])),
    ],
    ids=[
        "unknown row",
        "no such block",
        "unknown format",
        "no such slab",
        "no such place",
        "twice",
        "parallel",
        "token",
    ],
)
def test_step_that_contradicts_itself_or_the_mirror_is_malformed(request_: pb.StepRequest) -> None:
    mirror = make_mirror()
    add(mirror, new_row(1, range(7), entries_of(0)))
    with pytest.raises(MalformedStepError):
        mirror.apply(request_)


def test_preempted_rows_stay_so_that_more_rows_fit_than_a_step_computes() -> None:
    mirror = make_mirror(max_num_seqs=2)
    for seq_id in range(1, 8):
        add(mirror, new_row(seq_id, [seq_id] * 5, entries_of(seq_id)))
    assert len(mirror) == 7
    assert [tokens(mirror, seq_id) for seq_id in range(1, 8)] == [[seq_id] * 5 for seq_id in range(1, 8)]


def test_slots_are_used_again() -> None:
    mirror = make_mirror(max_num_seqs=2)
    for seq_id in range(100):
        add(mirror, new_row(seq_id, [5], entries_of(0)))
        mirror.apply(pb.StepRequest(finished_seq_ids=[seq_id]))
    assert len(mirror) == 0
    assert len(mirror.seq_ids) == 2
