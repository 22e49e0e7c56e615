"""What is written behind: the last word of each block, changes before repetitions, within a bound."""

from scheduler_svc.index.breaker import Breaker
from scheduler_svc.index.memory import MemoryIndex
from scheduler_svc.index.pending import PendingWrites, Write

from .shared_indexes import NATIVE, A, B, chain, native


def make_pending(max_marks: int = 100) -> tuple[MemoryIndex, PendingWrites]:
    local = MemoryIndex()
    return local, PendingWrites(local, max_marks)


def test_block_is_written_as_it_is_when_its_turn_comes() -> None:
    local, pending = make_pending()
    hashes = chain("x", 2)
    local.publish(A, native(hashes))
    pending.mark(A, hashes)
    local.withdraw(A, hashes[:1])
    pending.mark(A, hashes[:1])
    assert pending.take(10) == [Write(A, hashes[0], None), Write(A, hashes[1], NATIVE)]
    assert pending.take(10) == []


def test_oldest_marks_are_taken_first() -> None:
    local, pending = make_pending()
    hashes = chain("x", 3)
    local.publish(A, native(hashes))
    pending.mark(A, hashes)
    assert [write.block_hash for write in pending.take(2)] == hashes[:2]
    assert [write.block_hash for write in pending.take(2)] == hashes[2:]


def test_failed_writes_come_again_with_what_holds_then() -> None:
    local, pending = make_pending()
    hashes = chain("x", 1)
    local.publish(A, native(hashes))
    pending.mark(A, hashes)
    failed = pending.take(10)
    local.withdraw(A, hashes)
    pending.mark_again(failed)
    assert pending.take(10) == [Write(A, hashes[0], None)]


def test_sweep_covers_all_that_is_held_after_what_changed() -> None:
    local, pending = make_pending()
    for lane_id in (A, B):
        local.publish(lane_id, native(chain("x", 3)))
    pending.sweep()
    assert len(pending) == 6
    gone = chain("x", 1)
    local.withdraw(A, gone)
    pending.mark(A, gone)
    assert pending.take(10) == [Write(A, gone[0], None)]
    swept = [write for _ in range(10) for write in pending.take(2)]
    assert sorted(swept) == sorted(
        [Write(B, h, NATIVE) for h in chain("x", 3)] + [Write(A, h, NATIVE) for h in chain("x", 3)[1:]]
    )
    assert len(pending) == 0


def test_block_that_goes_during_a_sweep_is_not_claimed() -> None:
    local, pending = make_pending()
    local.publish(A, native(chain("x", 3)))
    pending.sweep()
    pending.take(1)
    local.drop_lane(A)
    assert pending.take(10) == []
    assert len(pending) == 0


def test_marks_past_the_bound_become_a_sweep_and_withdrawals_stay() -> None:
    local, pending = make_pending(max_marks=4)
    pending.mark(A, chain("gone", 1))
    local.publish(A, native(chain("x", 5)))
    pending.mark(A, chain("x", 5))
    assert pending.take(1) == [Write(A, chain("gone", 1)[0], None)]
    assert sorted(pending.take(10)) == [Write(A, block_hash, NATIVE) for block_hash in chain("x", 5)]


def test_more_withdrawals_than_the_bound_are_given_up() -> None:
    _, pending = make_pending(max_marks=4)
    pending.mark(A, chain("gone", 5))
    assert pending.take(10) == []


def test_breaker_waits_twice_as_long_after_each_failure_and_closes_at_once() -> None:
    breaker = Breaker(min_wait_ms=100, max_wait_ms=350)
    assert breaker.remaining_ms(0) == 0
    waits = []
    for _ in range(4):
        breaker.fail(1000)
        waits.append(breaker.remaining_ms(1000))
    assert waits == [100, 200, 350, 350]
    assert breaker.remaining_ms(1300) == 50
    assert breaker.remaining_ms(1350) == 0
    breaker.succeed()
    assert breaker.remaining_ms(1000) == 0
    breaker.fail(1000)
    assert breaker.remaining_ms(1000) == 100
