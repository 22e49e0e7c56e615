"""What every PrefixIndex does. A test class of an implementation inherits this and makes the index."""

from abc import ABC, abstractmethod

from protos.block_hash import BlockHash
from scheduler_svc.core.types import LaneId, PrefixIndex

A, B, C = LaneId("a"), LaneId("b"), LaneId("c")


def chain(name: str, num_blocks: int) -> list[BlockHash]:
    return [BlockHash(f"{name}-{idx}".encode().ljust(32)) for idx in range(num_blocks)]


class PrefixIndexContract(ABC):
    @abstractmethod
    def make_index(self) -> PrefixIndex:
        """Return an empty index."""

    def test_empty_index_knows_nothing(self) -> None:
        assert self.make_index().longest_prefix(chain("x", 3)) == {}

    def test_no_hashes_have_no_holder(self) -> None:
        index = self.make_index()
        index.publish(A, chain("x", 3))
        assert index.longest_prefix([]) == {}

    def test_each_lane_has_its_own_length(self) -> None:
        index, hashes = self.make_index(), chain("x", 4)
        index.publish(A, hashes[:1])
        index.publish(B, hashes[:3])
        index.publish(C, hashes)
        assert index.longest_prefix(hashes) == {A: 1, B: 3, C: 4}
        assert index.longest_prefix(hashes[:2]) == {A: 1, B: 2, C: 2}

    def test_prefix_ends_at_the_first_block_that_is_missing(self) -> None:
        index, hashes = self.make_index(), chain("x", 4)
        index.publish(A, [hashes[0], hashes[1], hashes[3]])
        assert index.longest_prefix(hashes) == {A: 2}

    def test_lane_without_the_first_block_is_not_named(self) -> None:
        index, hashes = self.make_index(), chain("x", 3)
        index.publish(A, hashes[1:])
        index.publish(B, hashes)
        assert index.longest_prefix(hashes) == {B: 3}

    def test_publishing_again_changes_nothing(self) -> None:
        index, hashes = self.make_index(), chain("x", 2)
        index.publish(A, hashes)
        index.publish(A, hashes)
        index.withdraw(A, hashes[1:])
        assert index.longest_prefix(hashes) == {A: 1}

    def test_withdrawn_blocks_are_gone_from_that_lane_alone(self) -> None:
        index, hashes = self.make_index(), chain("x", 3)
        index.publish(A, hashes)
        index.publish(B, hashes)
        index.withdraw(A, hashes[1:])
        assert index.longest_prefix(hashes) == {A: 1, B: 3}

    def test_withdrawing_the_unknown_is_ignored(self) -> None:
        index, hashes = self.make_index(), chain("x", 2)
        index.withdraw(A, hashes)
        index.publish(A, hashes)
        index.withdraw(A, chain("y", 1))
        index.withdraw(B, hashes)
        assert index.longest_prefix(hashes) == {A: 2}

    def test_dropped_lane_is_forgotten_and_may_come_back(self) -> None:
        index, hashes = self.make_index(), chain("x", 2)
        index.publish(A, hashes)
        index.publish(B, hashes)
        index.drop_lane(A)
        index.drop_lane(A)
        assert index.longest_prefix(hashes) == {B: 2}
        index.publish(A, hashes[:1])
        assert index.longest_prefix(hashes) == {A: 1, B: 2}

    def test_two_chains_do_not_mix(self) -> None:
        index = self.make_index()
        index.publish(A, chain("x", 2))
        index.publish(A, chain("y", 2))
        assert index.longest_prefix([chain("x", 1)[0], *chain("y", 2)]) == {A: 3}
        assert index.longest_prefix(chain("z", 2)) == {}
