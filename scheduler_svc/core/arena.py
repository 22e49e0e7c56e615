"""Where blocks lie: the identities of a lane's places, and the entries that name them on the wire.

    slab 0                    slab 1
    | 0 | 1 | ... | 15 |      | 256 | 257 | ... | 271 |      block ids, 16 native blocks a slab

A slab holds blocks of one format at a time. The native format is the only one so far, so every slab is native.
"""

from scheduler_svc.core.types import BlockId, Entry

PLACES_PER_SLAB = 256  # the stride of slabs in block ids: the most blocks of the narrowest format in one slab
FORMAT_CODES = 8  # the stride of block ids in entries
NATIVE_CODE = 0


def block_ids(num_blocks: int, blocks_per_slab: int) -> list[BlockId]:
    """Return the ids of the first `num_blocks` native places, in order."""
    return [BlockId(i // blocks_per_slab * PLACES_PER_SLAB + i % blocks_per_slab) for i in range(num_blocks)]


def native_entry(block_id: BlockId) -> Entry:
    """Return the block-table entry of a native block."""
    return Entry(block_id * FORMAT_CODES + NATIVE_CODE)


def block_id_of(entry: Entry) -> BlockId:
    """Return the block that an entry names, whatever its format."""
    return BlockId(entry // FORMAT_CODES)
