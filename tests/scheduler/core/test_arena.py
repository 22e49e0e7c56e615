"""Places: given out, given back, slabs that go from format to format; in any order nothing leaks or overlaps."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.core.arena import NativeArena, SlabArena, entry_of
from scheduler_svc.core.types import BlockId, Entry, Format

NATIVE, INT8, INT4 = Format.NATIVE, Format.INT8, Format.INT4
CAPACITIES = {NATIVE: 2, INT8: 3, INT4: 5}


def take(arena: SlabArena, fmt: Format, num: int) -> list[BlockId | None]:
    return [arena.take(fmt) for _ in range(num)]


def test_native_places_are_reused_in_the_order_in_which_they_became_blank() -> None:
    arena = NativeArena(4, 2)
    assert [arena.take(NATIVE) for _ in range(5)] == [0, 1, 256, 257, None]
    arena.give_back(BlockId(256))
    arena.give_back(BlockId(0))
    assert [arena.take(NATIVE), arena.take(NATIVE)] == [256, 0]


def test_a_slab_holds_one_format_and_the_fullest_is_filled_first() -> None:
    arena = SlabArena(6, CAPACITIES)
    assert take(arena, NATIVE, 3) == [0, 1, 256]
    assert take(arena, INT8, 4) == [512, 513, 514, 768]
    arena.give_back(BlockId(513))
    assert take(arena, INT8, 2) == [513, 769]


def test_an_empty_slab_serves_any_format() -> None:
    arena = SlabArena(3, {NATIVE: 2, INT4: 5})
    take(arena, NATIVE, 4)
    assert take(arena, INT4, 6) == [512, 513, 514, 515, 516, None]
    arena.give_back(BlockId(0))
    arena.give_back(BlockId(1))
    assert arena.take(INT4) == 0


def test_wider_formats_leave_free_slabs_to_narrower_ones() -> None:
    arena = SlabArena(3, CAPACITIES)
    assert take(arena, NATIVE, 3) == [0, 1, None]
    assert take(arena, INT8, 4) == [256, 257, 258, None]
    assert take(arena, INT4, 6) == [512, 513, 514, 515, 516, None]


def test_what_can_be_taken_is_counted() -> None:
    arena = SlabArena(4, CAPACITIES)
    assert [arena.num_takeable(fmt) for fmt in CAPACITIES] == [4, 9, 20]
    arena.take(NATIVE)
    assert [arena.num_takeable(fmt) for fmt in CAPACITIES] == [3, 6, 15]
    assert arena.num_blank == 7


def test_the_slab_that_the_fewest_moves_empty_is_emptied() -> None:
    arena = SlabArena(6, CAPACITIES)
    take(arena, INT8, 9)
    for block_id in (0, 1, 256):
        arena.give_back(BlockId(block_id))
    slab = arena.start_emptying()
    assert slab is not None
    assert slab.block_ids() == [2]
    assert arena.take(INT8) == 256
    assert arena.start_emptying() is None
    arena.give_back(BlockId(2))
    assert arena.num_free_slabs == 4
    arena.check_integrity({BlockId(i) for i in (256, 257, 258, 512, 513, 514)})


def test_claimed_places_are_occupied_and_slabs_of_two_formats_are_not_believed() -> None:
    arena = SlabArena(4, CAPACITIES)
    good = [entry_of(BlockId(257), INT8), entry_of(BlockId(512), INT4)]
    bad = [
        entry_of(BlockId(0), NATIVE),
        entry_of(BlockId(1), INT8),
        entry_of(BlockId(516 + 1), INT4),  # beyond the capacity
        entry_of(BlockId(1024), NATIVE),  # beyond the arena
    ]
    assert arena.claim([*good, *bad]) == good
    arena.check_integrity({BlockId(257), BlockId(512)})
    assert take(arena, INT8, 2) == [256, 258]
    native = NativeArena(4, 2)
    assert native.claim([Entry(8), Entry(9), Entry(5 * 8)]) == [8]
    assert native.take(NATIVE) == 0
    assert native.take(NATIVE) == 256


class ArenaMachine(RuleBasedStateMachine):
    """Blocks come and go; steps are planned with moves, and applied; a place given up waits for the steps that name it.

    The machine stands for the owner of an arena: it moves blocks and keeps places given up in quarantine.
    """

    @initialize(
        num_slabs=st.integers(3, 9), capacities=st.sampled_from([CAPACITIES, {NATIVE: 2, INT4: 5}, {NATIVE: 4}])
    )
    def start(self, num_slabs: int, capacities: dict[Format, int]) -> None:
        self.arena = SlabArena(num_slabs, capacities)
        self.blocks: dict[BlockId, Format] = {}
        self.quarantine: list[tuple[int, BlockId, Format]] = []
        self.num_planned = self.num_applied = 0

    @rule(fmt=st.sampled_from(list(CAPACITIES)))
    def allocate(self, fmt: Format) -> None:
        if fmt not in self.arena.capacities:
            return
        num_takeable = self.arena.num_takeable(fmt)
        block_id = self.arena.take(fmt)
        assert (block_id is not None) == (num_takeable > 0)
        if block_id is not None:
            self.add(block_id, fmt)

    @rule(choice=st.integers(0, 99), num=st.integers(1, 6))
    def release(self, choice: int, num: int) -> None:
        for _ in range(min(num, len(self.blocks))):
            block_id = list(self.blocks)[choice % len(self.blocks)]
            self.quarantine.append((self.num_planned, block_id, self.blocks.pop(block_id)))
        self.end_quarantine()

    @precondition(lambda self: self.num_planned - self.num_applied < 2)
    @rule(num_slabs=st.integers(0, 2))
    def plan(self, num_slabs: int) -> None:
        for _ in range(num_slabs):
            self.arena.start_emptying()
        self.num_planned += 1
        for slab in self.arena.emptying.values():
            for block_id in slab.block_ids():
                if block_id in self.blocks:
                    self.move(block_id)

    @precondition(lambda self: self.num_planned > self.num_applied)
    @rule()
    def apply(self) -> None:
        self.num_applied += 1
        self.end_quarantine()

    @rule(fmt=st.sampled_from(list(CAPACITIES)))
    def allocate_within_two_steps(self, fmt: Format) -> None:
        """Where the blocks, packed, leave a slab outside the reserve, two steps at most make room for one more."""
        if (
            fmt not in self.arena.capacities
            or self.num_packed_slabs() + self.arena.reserve_slabs >= self.arena.num_slabs
        ):
            return
        if self.num_planned - self.num_applied == 2:
            self.apply()
        block_id = self.arena.take(fmt)
        if block_id is None:
            num_wanted = self.arena.reserve_slabs + 1 - self.arena.num_free_slabs - len(self.arena.emptying)
            self.plan(max(0, num_wanted))
            while self.num_applied < self.num_planned:
                self.apply()
            block_id = self.arena.take(fmt)
        assert block_id is not None
        self.add(block_id, fmt)

    def num_packed_slabs(self) -> int:
        """Return how many slabs hold all blocks, those in quarantine too, packed as tightly as can be."""
        formats = [*self.blocks.values(), *(fmt for _, _, fmt in self.quarantine)]
        return sum(-(-formats.count(fmt) // capacity) for fmt, capacity in self.arena.capacities.items())

    def add(self, block_id: BlockId, fmt: Format) -> None:
        assert block_id not in self.blocks
        assert block_id not in {other for _, other, _ in self.quarantine}
        self.blocks[block_id] = fmt

    def move(self, block_id: BlockId) -> None:
        fmt = self.blocks.pop(block_id)
        destination = self.arena.take(fmt)
        assert destination is not None, "a slab was to be emptied whose blocks fit nowhere"
        self.add(destination, fmt)
        self.quarantine.append((self.num_planned, block_id, fmt))

    def end_quarantine(self) -> None:
        for until, block_id, _ in self.quarantine:
            if until <= self.num_applied:
                self.arena.give_back(block_id)
        self.quarantine = [item for item in self.quarantine if item[0] > self.num_applied]

    @invariant()
    def nothing_leaks_or_overlaps(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check_integrity({*self.blocks, *(block_id for _, block_id, _ in self.quarantine)})
        places: dict[int, set[Format]] = {}
        for block_id, fmt in [*self.blocks.items(), *((block_id, fmt) for _, block_id, fmt in self.quarantine)]:
            places.setdefault(block_id // 256, set()).add(fmt)
            assert block_id % 256 < self.arena.capacities[fmt]
        assert all(len(formats) == 1 for formats in places.values()), "bytes of two formats overlap"


ArenaMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestArena = ArenaMachine.TestCase
