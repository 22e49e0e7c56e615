"""What the prefix index is told of a lane: blocks sealed or narrowed, and blocks whose last copy was evicted."""

from scheduler_svc.core.lane import Lane
from scheduler_svc.core.state import State


def publish_sealed(state: State, lane: Lane) -> None:
    """Tell the index of the blocks sealed, or narrowed, since the last call."""
    if lane.kv.new_hashes:
        state.index.publish(lane.lane_id, lane.kv.new_hashes)
        lane.kv.new_hashes = {}


def withdraw_evicted(state: State, lane: Lane) -> None:
    """Tell the index of the blocks evicted since the last call, and count them."""
    pool = lane.kv.pool
    state.counters.evicted_blocks += pool.num_evictions
    pool.num_evictions = 0
    if pool.evicted_hashes:
        state.index.withdraw(lane.lane_id, pool.evicted_hashes)
        pool.evicted_hashes = []
