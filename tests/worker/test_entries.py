"""Seals follow what the arena's places hold, whatever was there before."""

from protos import worker_pb2 as pb
from tests.worker.fakes import entries_of, entry_of, seals
from worker_svc.entries import SealBook

H1, H2, H3 = (bytes([number]) * 32 for number in (1, 2, 3))


def contents(book: SealBook) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for part in book.parts():
        for idx, sealed in enumerate(part.seals.entries):
            found[sealed] = part.seals.block_hashes[32 * idx : 32 * idx + 32]
    return found


def test_manifest_is_every_seal_that_no_write_voided() -> None:
    book = SealBook()
    book.record(seals((entry_of(0), H1), (entry_of(1), H2), (entry_of(9), H3)))
    book.void(entries_of(1, 20))
    assert contents(book) == {entry_of(0): H1, entry_of(9): H3}
    assert len(book) == 2


def test_new_seal_of_a_place_replaces_the_old_one() -> None:
    book = SealBook()
    book.record(seals((entry_of(4), H1)))
    book.record(seals((entry_of(4), H2)))
    assert contents(book) == {entry_of(4): H2}


def test_write_in_another_format_voids_the_whole_slab() -> None:
    book = SealBook()
    book.record(seals((entry_of(0), H1), (entry_of(1), H2), (entry_of(4), H3)))
    int8_place_in_slab_0 = (30 << 3) | 1
    book.void([int8_place_in_slab_0])
    assert contents(book) == {entry_of(4): H3}


def test_each_seal_has_its_own_recipe_version() -> None:
    book = SealBook()
    book.record(pb.Seals(entries=entries_of(0, 1), block_hashes=H1 + H2, recipe_versions=[4, 5]))
    (part,) = book.parts()
    assert list(part.seals.recipe_versions) == [4, 5]


def test_manifest_parts_stay_within_a_mebibyte() -> None:
    book = SealBook()
    slab_1000 = 1000 << 11
    for slab_idx in range(200):
        entries = [slab_1000 + (slab_idx << 11) + (place << 3) for place in range(256)]
        book.record(pb.Seals(entries=entries, block_hashes=H1 * 256, recipe_versions=[7]))
    parts = list(book.parts())
    assert len(parts) > 1
    assert sum(len(part.seals.entries) for part in parts) == 200 * 256
    assert max(part.ByteSize() for part in parts) <= 1024 * 1024
