"""Block-table entries as the worker sees them: which ones name a place of its arena, and which places have a seal.

A kernel follows entries without looking, so an entry that names no place is refused when it arrives.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.formats import ENTRY_FORMAT_BITS, FORMAT_MASK, PLACES_PER_SLAB, Format
from protos import worker_pb2 as pb
from protos.block_hash import HASH_BYTES
from worker_svc.errors import MalformedStepError

# 1 MiB is the limit of a manifest part; a seal takes its hash and at most 10 bytes of two varints.
SEALS_PER_PART = 1024 * 1024 // (HASH_BYTES + 16)


def max_row_blocks(max_model_len: int, block_size: int) -> int:
    """Return the entries of a row's table: room for one token beyond the longest sequence."""
    return max_model_len // block_size + 1


class EntryBounds:
    """What the arena holds: slabs, and places a slab for each format that the worker has."""

    def __init__(self, num_slabs: int, places_per_slab: Mapping[Format, int]) -> None:
        self._num_slabs = num_slabs
        self._places = np.zeros(FORMAT_MASK + 1, dtype=np.int64)  # by format code; 0 for one that is not here
        for fmt, count in places_per_slab.items():
            self._places[fmt] = count

    def check(self, entries: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the entries as an array. Raises MalformedStepError when one names no place of the arena."""
        array = np.array(entries, dtype=np.int64)
        block_ids = array >> ENTRY_FORMAT_BITS
        wrong = block_ids // PLACES_PER_SLAB >= self._num_slabs
        wrong |= block_ids % PLACES_PER_SLAB >= self._places[array & FORMAT_MASK]
        if wrong.any():
            raise MalformedStepError(f"entry {array[wrong][0]} names no place of this worker's arena")
        return array

    def check_copies(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """Raise MalformedStepError unless each source goes to a place of its own format."""
        sources, destinations = self._check_pairs(src_entries, dst_entries)
        if (sources & FORMAT_MASK != destinations & FORMAT_MASK).any():
            raise MalformedStepError("a block would be copied to a place of another format")

    def check_requantizations(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """Raise MalformedStepError unless each source goes to a place of a narrower format."""
        sources, destinations = self._check_pairs(src_entries, dst_entries)
        if (sources & FORMAT_MASK >= destinations & FORMAT_MASK).any():
            raise MalformedStepError("a block would be requantized to a format that is not narrower")

    def _check_pairs(
        self, src_entries: Sequence[int], dst_entries: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if len(src_entries) != len(dst_entries):
            raise MalformedStepError("block operations have sources and destinations of different number")
        return self.check(src_entries), self.check(dst_entries)


@dataclass(frozen=True, slots=True)
class Seal:
    """What a place holds."""

    block_hash: bytes
    recipe_version: int


class SealBook:
    """The seals of the arena's places. A place without one is free, or is still being written.

    Seals are kept by slab: a slab that was given to another format has other places over the same bytes, so a write in
    one format voids every seal that the slab has in another.
    """

    def __init__(self) -> None:
        self._seals_of_slab: dict[int, dict[int, Seal]] = {}  # slab_idx -> entry -> seal

    def __len__(self) -> int:
        return sum(map(len, self._seals_of_slab.values()))

    def record(self, seals: pb.Seals) -> None:
        """Record the seals of a step. Raises MalformedStepError when parallel arrays differ in length."""
        versions = seals.recipe_versions
        if len(seals.block_hashes) != HASH_BYTES * len(seals.entries) or len(versions) not in (1, len(seals.entries)):
            raise MalformedStepError(f"{len(seals.entries)} seals come with hashes or versions of another number")
        for idx, entry in enumerate(seals.entries):
            block_hash = seals.block_hashes[idx * HASH_BYTES : (idx + 1) * HASH_BYTES]
            seal = Seal(block_hash, versions[0 if len(versions) == 1 else idx])
            self._seals_of_slab.setdefault(_slab_of(entry), {})[entry] = seal

    def void(self, entries: Iterable[int]) -> None:
        """Drop the seals of places that are about to be written."""
        for entry in entries:
            seals = self._seals_of_slab.get(_slab_of(entry))
            if seals is None:
                continue
            seals.pop(entry, None)
            if seals and (next(iter(seals)) ^ entry) & FORMAT_MASK:
                seals.clear()

    def parts(self) -> Iterator[pb.ManifestPart]:
        """Return every seal, in messages of at most 1 MiB."""
        items = [item for seals in self._seals_of_slab.values() for item in seals.items()]
        for begin in range(0, len(items), SEALS_PER_PART):
            part = items[begin : begin + SEALS_PER_PART]
            yield pb.ManifestPart(
                seals=pb.Seals(
                    entries=[entry for entry, _ in part],
                    block_hashes=b"".join(seal.block_hash for _, seal in part),
                    recipe_versions=[seal.recipe_version for _, seal in part],
                )
            )


def _slab_of(entry: int) -> int:
    return entry >> ENTRY_FORMAT_BITS + (PLACES_PER_SLAB.bit_length() - 1)
