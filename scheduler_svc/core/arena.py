"""Where blocks lie: the places of a lane's arena, and the entries that name them on the wire.

    slab 0, native            slab 1, int8              slab 2, free
    | 0 | 1 | ... | 15 |      | 256 | 257 | ... | 286 |                       block ids

A slab holds blocks of one format at a time; how many is the format's capacity. Two arenas give places out: in a
NativeArena every slab is native for ever; a SlabArena gives slabs to formats and takes them back when they are empty.
Neither knows of steps: a place that a step in flight still names must not be given back (block_pool keeps it).
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.core.types import BlockId, Entry, Format, LaneSpec

PLACES_PER_SLAB = 256  # the stride of slabs in block ids: the most blocks of the narrowest format in one slab
FORMAT_CODES = 8  # the stride of block ids in entries
MAX_SLABS = 2**31 // (PLACES_PER_SLAB * FORMAT_CODES)  # an entry is a non-negative int32


def block_ids(num_blocks: int, blocks_per_slab: int) -> list[BlockId]:
    """Return the ids of the first `num_blocks` places of a format of which a slab holds `blocks_per_slab`, in order."""
    return [BlockId(i // blocks_per_slab * PLACES_PER_SLAB + i % blocks_per_slab) for i in range(num_blocks)]


def entry_of(block_id: BlockId, fmt: Format) -> Entry:
    """Return the block-table entry of a block in a format."""
    return Entry(block_id * FORMAT_CODES + fmt)


def block_id_of(entry: Entry) -> BlockId:
    """Return the block that an entry names, whatever its format."""
    return BlockId(entry // FORMAT_CODES)


def format_of(entry: Entry) -> Format:
    """Return the format of the block that an entry names."""
    return Format(entry % FORMAT_CODES)


def lies_within(entry: Entry, spec: LaneSpec) -> bool:
    """Return whether an entry names a place of a lane's arena."""
    slab_idx, place = divmod(block_id_of(entry), PLACES_PER_SLAB)
    capacity = next((num for fmt, num in spec.capacities.items() if fmt == entry % FORMAT_CODES), 0)
    if entry % FORMAT_CODES == Format.NATIVE and slab_idx * capacity + place >= spec.num_blocks:
        return False  # the last slab may be cut off
    return place < capacity and slab_idx < spec.num_slabs


class Arena(Protocol):
    """Places of a lane's arena."""

    def take(self, fmt: Format) -> BlockId | None:
        """Return a blank place for a block of that format, which is occupied from now on; None: there is none."""

    def give_back(self, block_id: BlockId) -> None:
        """Make an occupied place blank. Nobody names it any more, nor does a step in flight."""

    def claim(self, entries: Iterable[Entry]) -> list[Entry]:
        """Occupy the places of these entries in an arena that is all blank; return those that can be."""

    @property
    def num_blocks(self) -> int:
        """What the arena holds, in native blocks."""

    @property
    def num_blank(self) -> int:
        """What is blank of it, in native blocks."""

    def in_native_blocks(self, num_blocks_of: Sequence[int]) -> int:
        """Return the room that so many blocks of each format, by format code, take, in native blocks, rounded up."""

    def check_integrity(self, occupied: set[BlockId]) -> None:
        """Raise AssertionError unless these places are occupied and all others blank."""


class NativeArena:
    """An arena in which every slab is native: places are given out in the order in which they became blank."""

    def __init__(self, num_blocks: int, blocks_per_slab: int) -> None:
        self._num_blocks = num_blocks
        self._blank = deque(block_ids(num_blocks, blocks_per_slab))

    def take(self, fmt: Format) -> BlockId | None:
        """Return the place that has been blank for longest; see Arena."""
        assert fmt is Format.NATIVE
        return self._blank.popleft() if self._blank else None

    def give_back(self, block_id: BlockId) -> None:
        """Make an occupied place blank; see Arena."""
        self._blank.append(block_id)

    def claim(self, entries: Iterable[Entry]) -> list[Entry]:
        """Occupy the places of these entries; see Arena."""
        blank = set(self._blank)
        claimed = [entry for entry in entries if format_of(entry) is Format.NATIVE and block_id_of(entry) in blank]
        blank.difference_update(map(block_id_of, claimed))
        self._blank = deque(block_id for block_id in self._blank if block_id in blank)
        return claimed

    @property
    def num_blocks(self) -> int:
        """All places."""
        return self._num_blocks

    @property
    def num_blank(self) -> int:
        """Blank places."""
        return len(self._blank)

    def in_native_blocks(self, num_blocks_of: Sequence[int]) -> int:
        """See Arena."""
        return num_blocks_of[Format.NATIVE]

    def check_integrity(self, occupied: set[BlockId]) -> None:
        """Raise AssertionError unless these places are occupied and all others blank."""
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a place is blank twice"
        assert not blank & occupied, "a place is blank and occupied"
        assert len(blank) + len(occupied) == self._num_blocks, "a place leaked"


@dataclass(slots=True, eq=False)
class Slab:
    """A slab that was given to a format: places below `num_opened` have been occupied, those in `blank` are no more."""

    slab_idx: int
    fmt: Format
    num_opened: int = 0
    blank: list[int] = field(default_factory=list)

    @property
    def num_occupied(self) -> int:
        """Places that hold a block."""
        return self.num_opened - len(self.blank)

    def take(self) -> BlockId:
        """Occupy a place, one that was occupied before if there is one."""
        if self.blank:
            place = self.blank.pop()
        else:
            place = self.num_opened
            self.num_opened += 1
        return BlockId(self.slab_idx * PLACES_PER_SLAB + place)

    def block_ids(self) -> list[BlockId]:
        """Return the occupied places, in order."""
        blank = set(self.blank)
        first = self.slab_idx * PLACES_PER_SLAB
        return [BlockId(first + place) for place in range(self.num_opened) if place not in blank]


class _Shelf:
    """The slabs of one format, by the number of occupied places: `mask` has a bit for each number that occurs.

    Slabs that are being emptied are not on the shelf.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_blank = 0
        self._by_occupied: list[dict[int, Slab]] = [{} for _ in range(capacity + 1)]
        self._mask = 0

    def put(self, slab: Slab) -> None:
        """Add a slab."""
        num_occupied = slab.num_occupied
        self._by_occupied[num_occupied][slab.slab_idx] = slab
        self._mask |= 1 << num_occupied
        self.num_blank += self.capacity - num_occupied

    def remove(self, slab: Slab) -> None:
        """Take a slab out, before its number of occupied places changes."""
        num_occupied = slab.num_occupied
        del self._by_occupied[num_occupied][slab.slab_idx]
        if not self._by_occupied[num_occupied]:
            self._mask ^= 1 << num_occupied
        self.num_blank -= self.capacity - num_occupied

    def fullest_with_blank(self) -> Slab | None:
        """Return a slab with as few blank places as possible, but with one."""
        partial = self._mask & ~(1 << self.capacity)
        return self._any(partial.bit_length() - 1) if partial else None

    def emptiest(self) -> Slab | None:
        """Return a slab with as few occupied places as possible."""
        return self._any((self._mask & -self._mask).bit_length() - 1) if self._mask else None

    def _any(self, num_occupied: int) -> Slab:
        return next(iter(self._by_occupied[num_occupied].values()))

    def slabs(self) -> list[Slab]:
        """Return all slabs."""
        return [slab for slabs in self._by_occupied for slab in slabs.values()]


class SlabArena:
    """An arena whose slabs go to the formats that need them.

    Partly filled slabs are filled first, the fullest of them before the others, so that the rest may run empty. When
    slabs run short, `start_emptying` picks one whose blocks fit into others of its format; the owner moves them. All is
    O(1), but for listing the blocks of a slab that is to be emptied.

    The last free slabs are kept: native blocks leave one for each other format, and those leave one for each that is
    narrower. Narrowing is how room is made, so it must find room.
    """

    def __init__(self, num_slabs: int, capacities: Mapping[Format, int]) -> None:
        formats = sorted(capacities)
        self.num_slabs = num_slabs
        self.capacities = dict(capacities)
        self.reserve_slabs = len(formats) - 1
        self.emptying: dict[int, Slab] = {}  # by slab_idx
        self._free = deque(range(num_slabs))
        self._slabs: dict[int, Slab] = {}  # those given to a format, by slab_idx
        self._shelves = {fmt: _Shelf(capacities[fmt]) for fmt in formats}
        self._kept = {fmt: self.reserve_slabs - rank for rank, fmt in enumerate(formats)}  # free slabs that it leaves

    @property
    def num_blocks(self) -> int:
        """Native blocks that fit when every slab is native."""
        return self.num_slabs * self.capacities[Format.NATIVE]

    def in_native_blocks(self, num_blocks_of: Sequence[int]) -> int:
        """See Arena."""
        native = self.capacities[Format.NATIVE]
        return sum(-(-num_blocks_of[fmt] * native // capacity) for fmt, capacity in self.capacities.items())

    @property
    def num_blank(self) -> int:
        """What is blank, in native blocks; a place of a narrower format counts as the part of a slab that it is."""
        native = self.capacities[Format.NATIVE]
        partial = sum(shelf.num_blank * native // shelf.capacity for shelf in self._shelves.values())
        return len(self._free) * native + partial

    @property
    def num_free_slabs(self) -> int:
        """Slabs that no format has."""
        return len(self._free)

    def num_blank_of(self, fmt: Format) -> int:
        """Return how many places are blank in slabs of that format, those being emptied left out."""
        return self._shelves[fmt].num_blank

    def num_takeable(self, fmt: Format) -> int:
        """Return how many places of that format `take` would give, one after the other."""
        shelf = self._shelves[fmt]
        return shelf.num_blank + max(0, len(self._free) - self._kept[fmt]) * shelf.capacity

    def take(self, fmt: Format) -> BlockId | None:
        """Return a place in the fullest slab of that format that has one, or else in a free slab; see Arena."""
        shelf = self._shelves[fmt]
        slab = shelf.fullest_with_blank()
        if slab is not None:
            shelf.remove(slab)
        elif len(self._free) > self._kept[fmt]:
            slab_idx = self._free.popleft()
            slab = self._slabs[slab_idx] = Slab(slab_idx, fmt)
        else:
            return None
        block_id = slab.take()
        shelf.put(slab)
        return block_id

    def give_back(self, block_id: BlockId) -> None:
        """Make an occupied place blank, and its slab free with the last one; see Arena."""
        slab_idx, place = divmod(block_id, PLACES_PER_SLAB)
        slab = self._slabs[slab_idx]
        is_emptying = slab_idx in self.emptying
        shelf = self._shelves[slab.fmt]
        if not is_emptying:
            shelf.remove(slab)
        slab.blank.append(place)
        if slab.num_occupied == 0:
            del self._slabs[slab_idx]
            self.emptying.pop(slab_idx, None)
            self._free.append(slab_idx)
        elif not is_emptying:
            shelf.put(slab)

    def num_emptiable(self, fmt: Format) -> int:
        """Return how many slabs of a format moves can empty, beside those being emptied."""
        shelf = self._shelves[fmt]
        return shelf.num_blank // shelf.capacity

    def num_slabs_coming(self) -> int:
        """Return how many slabs are free, being emptied, or can be emptied by moves."""
        return len(self._free) + len(self.emptying) + sum(map(self.num_emptiable, self._shelves))

    def start_emptying(self) -> Slab | None:
        """Pick the slab that the fewest moves empty and fill it no more; None: no slab's blocks fit elsewhere."""
        shelves = [shelf for fmt, shelf in self._shelves.items() if self.num_emptiable(fmt)]
        slabs = [slab for shelf in shelves if (slab := shelf.emptiest()) is not None]
        if not slabs:
            return None
        slab = min(slabs, key=lambda slab: slab.num_occupied)
        self._shelves[slab.fmt].remove(slab)
        self.emptying[slab.slab_idx] = slab
        return slab

    def reopen(self, slab: Slab) -> None:
        """Fill a slab again that was being emptied."""
        del self.emptying[slab.slab_idx]
        self._shelves[slab.fmt].put(slab)

    def claim(self, entries: Iterable[Entry]) -> list[Entry]:
        """Occupy the places of these entries. A slab that they give to several formats stays free; see Arena."""
        by_slab: dict[int, list[Entry]] = {}
        for entry in entries:
            by_slab.setdefault(block_id_of(entry) // PLACES_PER_SLAB, []).append(entry)
        claimed: list[Entry] = []
        for slab_idx, slab_entries in by_slab.items():
            formats = {format_of(entry) for entry in slab_entries}
            if len(formats) == 1 and formats <= self._shelves.keys() and slab_idx < self.num_slabs:
                claimed += self._claim_slab(slab_idx, slab_entries)
        self._free = deque(slab_idx for slab_idx in self._free if slab_idx not in self._slabs)
        return claimed

    def _claim_slab(self, slab_idx: int, entries: list[Entry]) -> list[Entry]:
        fmt = format_of(entries[0])
        shelf = self._shelves[fmt]
        by_place = {block_id_of(entry) % PLACES_PER_SLAB: entry for entry in entries}
        places = {place for place in by_place if place < shelf.capacity}
        if not places:
            return []
        num_opened = max(places) + 1
        slab = Slab(slab_idx, fmt, num_opened, [place for place in range(num_opened) if place not in places])
        self._slabs[slab_idx] = slab
        shelf.put(slab)
        return [by_place[place] for place in places]

    def check_integrity(self, occupied: set[BlockId]) -> None:
        """Raise AssertionError unless these places are occupied and all others blank."""
        slabs = list(self._slabs.values())
        named = [block_id for slab in slabs for block_id in slab.block_ids()]
        assert len(named) == len(set(named)), "a place is occupied twice"
        assert set(named) == occupied, "places are occupied that nobody has, or the other way round"
        assert not set(self._free) & self._slabs.keys(), "a slab is free and given to a format"
        assert len(self._free) + len(slabs) == self.num_slabs, "a slab leaked"
        assert all(slab.num_occupied for slab in slabs), "an empty slab is not free"
        assert all(slab.num_opened <= self.capacities[slab.fmt] for slab in slabs), "a slab is overfull"
        for fmt, shelf in self._shelves.items():
            shelved = [slab for slab in slabs if slab.fmt is fmt and slab.slab_idx not in self.emptying]
            assert {slab.slab_idx for slab in shelf.slabs()} == {slab.slab_idx for slab in shelved}, "shelf"
            assert shelf.num_blank == sum(shelf.capacity - slab.num_occupied for slab in shelved), "blank places"
