"""The shell's time constants in one place, so that tests can run with short ones, and the clock they are read by."""

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], int]  # ms; monotonic, from an arbitrary origin


def monotonic_ms() -> int:
    """Return the process's monotonic clock in ms."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Timing:
    """How long to wait for what, in ms."""

    tick_ms: int = 100  # between two looks at all timers
    sign_of_life_ms: int = 1000  # between two messages of a session, and between a worker's heartbeats
    silence_ms: int = 3000  # without a sign of life a session is broken and a lane is lost
    detached_ms: int = 2000  # a request whose session broke waits so long for its gateway
    unread_ms: int = 30_000  # a gateway that does not take a message for so long is broken
    awaiting_model_ms: int = 10_000  # a new request that comes before any worker waits so long for one
    rejoin_ms: int = 2000  # after its start a scheduler binds nothing for so long while workers of its cell are missing
    fenced_ms: int = 10_000  # a worker that obeys another epoch than its lane's registers here again within
    dial_ms: int = 2000  # a worker that registers must answer at its address within
    manifest_ms: int = 30_000  # a worker must have told all its cached blocks within
    redial_ms: int = 200  # after a broken step stream the worker must be reached again within
    last_ends_ms: int = 1000  # what a drain ends by force is sent to gateways within
    stall_ms: int = 1000  # this loop being late by more says nothing about others: all timers start anew
    min_step_deadline_ms: int = 3000
    step_deadline_factor: int = 5  # times what the measured rate predicts
    unmeasured_step_deadline_ms: int = (
        300_000  # until a lane's first result there is no rate: its weights may be on disk
    )


@dataclass(frozen=True, slots=True)
class IndexTiming:
    """How long the shared prefix index keeps and waits, in ms."""

    beat_ms: int = 1000  # between two beats of the live set
    live_ttl_ms: int = 5000  # an instance without a beat for so long is dead to readers
    block_ttl_ms: int = 600_000  # a block's key without a word for so long is gone
    renew_ms: int = 200_000  # between two renewals of all keys
    write_pause_ms: int = 2  # between two batches of changes
    sweep_pause_ms: int = 10  # between two batches of a renewal
    lookup_ms: int = 20  # an answer to a look-up is of use within
    answer_ms: int = 3000  # connecting, and any other answer, take at most; nobody waits, and this loop may stall too
    min_backoff_ms: int = 100  # after a failure; doubles with each further one
    max_backoff_ms: int = 10_000
