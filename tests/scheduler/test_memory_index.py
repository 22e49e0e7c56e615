"""The index in memory keeps the contract, and nothing of what was withdrawn."""

from scheduler_svc.core.types import PrefixIndex
from scheduler_svc.index.memory import MemoryIndex

from .index_contract import A, B, PrefixIndexContract, chain


class TestMemoryIndex(PrefixIndexContract):
    def make_index(self) -> PrefixIndex:
        return MemoryIndex()


def test_nothing_is_kept_of_what_is_gone() -> None:
    index = MemoryIndex()
    index.publish(A, chain("x", 3))
    index.publish(B, chain("x", 3))
    index.withdraw(A, chain("x", 3))
    index.drop_lane(A)
    index.drop_lane(B)
    assert vars(index) == vars(MemoryIndex())
