"""Blocks: states, the order of reuse, quarantine, and copies of one hash."""

from protos.block_hash import BlockHash
from scheduler_svc.core.arena import NativeArena, SlabArena, block_ids, entry_of
from scheduler_svc.core.block_pool import Block, BlockPool
from scheduler_svc.core.types import BlockId, Entry, Format, Seal, StepId


def make_pool(num_blocks: int = 6) -> BlockPool:
    return BlockPool(NativeArena(num_blocks, blocks_per_slab=4))


def allocate(pool: BlockPool, num: int) -> list[Block]:
    return [pool.allocate() for _ in range(num)]


def ids(blocks: list[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def hash_of(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def test_ids_count_places_in_slabs() -> None:
    assert block_ids(6, 4) == [0, 1, 2, 3, 256, 257]


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = make_pool()
    first = allocate(pool, 2)
    pool.seal(first[0], hash_of(1))
    pool.release(reversed(first), None)
    assert ids(allocate(pool, 5)) == [2, 3, 256, 257, 1]
    assert pool.find(hash_of(1)) is first[0]
    assert ids(allocate(pool, 1)) == [0]
    assert pool.find(hash_of(1)) is None
    assert pool.evicted_hashes == [hash_of(1)]


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = make_pool(3)
    chain = allocate(pool, 3)
    for number, block in enumerate(chain):
        pool.seal(block, hash_of(number))
    pool.release(reversed(chain), None)
    assert ids(allocate(pool, 3)) == ids(chain)[::-1]


def test_a_touched_block_is_not_evicted() -> None:
    pool = make_pool(2)
    blocks = allocate(pool, 2)
    for number, block in enumerate(blocks):
        pool.seal(block, hash_of(number))
    pool.release(blocks, None)
    pool.touch([blocks[0]])
    assert pool.num_available == 1
    assert pool.allocate() is blocks[1]


def test_evicting_one_copy_keeps_the_other_mapped() -> None:
    pool = make_pool(2)
    one, other = allocate(pool, 2)
    assert pool.seal(one, hash_of(1))
    assert not pool.seal(other, hash_of(1))
    pool.release([one], None)
    assert pool.allocate() is one
    assert pool.find(hash_of(1)) is other
    assert pool.evicted_hashes == []


def test_quarantine_ends_with_its_step() -> None:
    pool = make_pool(2)
    blocks = allocate(pool, 2)
    pool.release([blocks[0]], StepId(3))
    pool.release([blocks[1]], StepId(4))
    pool.end_quarantine(StepId(2))
    assert (pool.num_available, pool.num_quarantined) == (0, 2)
    pool.end_quarantine(StepId(3))
    assert (pool.num_available, pool.num_quarantined) == (1, 1)


def test_a_hit_in_quarantine_stays_referenced() -> None:
    pool = make_pool(1)
    block = pool.allocate()
    pool.seal(block, hash_of(1))
    pool.release([block], StepId(1))
    pool.touch([block])
    pool.end_quarantine(StepId(1))
    assert pool.num_available == 0
    pool.check_integrity([[block]])


def test_a_block_released_again_waits_for_the_later_step() -> None:
    pool = make_pool(1)
    block = pool.allocate()
    pool.seal(block, hash_of(1))
    pool.release([block], StepId(1))
    pool.touch([block])
    pool.release([block], StepId(2))
    pool.end_quarantine(StepId(1))
    assert pool.num_available == 0
    pool.end_quarantine(StepId(2))
    assert pool.num_available == 1
    pool.check_integrity([])


def test_restored_blocks_are_cached_and_the_rest_blank() -> None:
    pool = make_pool(3)
    hashes = pool.restore([Seal(Entry(8), hash_of(1)), Seal(Entry(16), hash_of(2))])
    assert hashes == {hash_of(1): Format.NATIVE, hash_of(2): Format.NATIVE}
    assert (pool.num_blank, pool.num_cached) == (1, 2)
    found = pool.find(hash_of(2))
    assert found is not None
    assert found.block_id == BlockId(2)
    pool.check_integrity([])


def make_slab_pool(num_slabs: int = 6) -> BlockPool:
    return BlockPool(SlabArena(num_slabs, {Format.NATIVE: 2, Format.INT8: 3}))


def test_a_relocated_block_stays_itself_and_its_old_place_waits() -> None:
    pool = make_slab_pool()
    block = pool.allocate()
    pool.seal(block, hash_of(1))
    assert pool.relocate(block, Format.INT8, StepId(5))
    assert (block.entry, block.ref_cnt) == (entry_of(BlockId(256), Format.INT8), 1)
    assert pool.find(hash_of(1)) is block
    assert pool.num_quarantined == 1
    pool.check_integrity([[block]])
    pool.end_quarantine(StepId(5))
    assert ids([pool.allocate()]) == [512]  # the empty slab went to the end of the free ones
    pool.release([block], None)
    assert (pool.num_quarantined, pool.num_cached) == (0, 1)


def test_nothing_changes_when_there_is_no_place_to_relocate_to() -> None:
    pool = make_slab_pool(2)
    block = pool.allocate()
    assert allocate(pool, 1)
    native = pool.blocks[BlockId(1)]
    for _ in range(3):
        pool.allocate(Format.INT8)
    assert not pool.relocate(block, Format.INT8, StepId(1))
    assert (block.block_id, block.fmt, native.fmt) == (0, Format.NATIVE, Format.NATIVE)


def test_a_relocated_cached_block_is_not_evicted_in_the_same_step_but_can_be_hit() -> None:
    pool = make_slab_pool()
    block = pool.allocate()
    pool.seal(block, hash_of(1))
    pool.release([block], None)
    pool.relocate(block, Format.INT8, StepId(1))
    assert (pool.num_cached, pool.num_quarantined) == (0, 2)
    assert pool.find(hash_of(1)) is block
    pool.end_quarantine(StepId(1))
    assert pool.num_cached == 1
    pool.check_integrity([])


def test_what_a_failed_step_was_to_write_is_forgotten() -> None:
    pool = make_slab_pool()
    block, other = allocate(pool, 2)
    for number in (1, 2):
        pool.seal((block, other)[number - 1], hash_of(number))
    pool.release([other], None)
    pool.forget(block)
    pool.forget(other)
    assert (pool.find(hash_of(1)), pool.find(hash_of(2)), pool.num_cached) == (None, None, 0)
    assert pool.evicted_hashes == [hash_of(1), hash_of(2)]
    pool.check_integrity([[block]])


def test_the_widest_copy_is_the_best() -> None:
    pool = make_slab_pool()
    narrow, wide = pool.allocate(Format.INT8), pool.allocate()
    assert pool.best_copy(narrow) is narrow
    pool.seal(narrow, hash_of(1))
    pool.seal(wide, hash_of(1))
    assert pool.best_copy(narrow) is wide


def test_blocks_of_several_formats_are_restored() -> None:
    pool = make_slab_pool()
    seals = [
        Seal(entry_of(BlockId(1), Format.NATIVE), hash_of(1)),
        Seal(entry_of(BlockId(258), Format.INT8), hash_of(2)),
    ]
    assert pool.restore(seals) == {hash_of(1): Format.NATIVE, hash_of(2): Format.INT8}
    found = pool.find(hash_of(2))
    assert found is not None
    assert (found.block_id, found.fmt) == (258, Format.INT8)
    pool.check_integrity([])
