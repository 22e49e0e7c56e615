"""The cell's figures as a message."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from protos import scheduler_pb2
from protos.channel import Refusals
from scheduler_svc.cell import Cell
from scheduler_svc.registry import Lane

if TYPE_CHECKING:
    from scheduler_svc.index.redis import RedisIndex


def cell_stats(
    cell: Cell,
    lanes: Iterable[Lane],
    *,
    num_held_seqs: int,
    uptime_ms: int,
    is_draining: bool,
    shared_index: "RedisIndex | None",
    refusals: Refusals,
) -> scheduler_pb2.CellStats:
    """Return what dashboards see of the cell: its live lanes, its queue, and totals since the scheduler's start."""
    counters = cell.core.counters
    return scheduler_pb2.CellStats(
        lanes=[_lane_stats(cell, lane) for lane in lanes if lane.driver.is_live],
        num_waiting_seqs=cell.core.num_waiting_seqs + num_held_seqs,
        num_running_seqs=cell.core.num_running_seqs,
        prefix_cache_queries_total=counters.prefix_cache_queries,
        prefix_cache_hits_total=counters.prefix_cache_hits,
        num_preemptions_total=counters.preemptions,
        num_prompt_tokens_total=counters.prompt_tokens,
        num_output_tokens_total=counters.output_tokens,
        num_steps_total=counters.steps,
        num_evicted_blocks_total=counters.evicted_blocks,
        num_worker_losses_total=counters.worker_losses,
        uptime_ms=uptime_ms,
        draining=is_draining,
        num_demoted_blocks_total=counters.demoted_blocks,
        num_pressed_blocks_total=counters.pressed_blocks,
        num_moved_blocks_total=counters.moved_blocks,
        shared_index=_shared_index_stats(shared_index) if shared_index is not None else None,
        num_refused_calls_total=refusals.totals,
    )


def _shared_index_stats(index: "RedisIndex") -> scheduler_pb2.SharedIndexStats:
    counters = index.counters
    return scheduler_pb2.SharedIndexStats(
        up=index.is_up,
        num_live_instances=len(index.live),
        num_live_cells=len({instance.cell_name for instance in index.live.values()}),
        num_pending_writes=index.num_pending_writes,
        num_writes_total=counters.writes,
        num_republishes_total=counters.republishes,
        num_outages_total=counters.outages,
        num_lookups_total=counters.lookups,
        num_failed_lookups_total=counters.failed_lookups,
        lookup_ms_total=counters.lookup_ms,
        num_longer_elsewhere_total=counters.longer_elsewhere,
        num_stale_hints_total=counters.stale_hints,
    )


def _lane_stats(cell: Cell, lane: Lane) -> scheduler_pb2.LaneStats:
    identity = lane.driver.identity
    figures = cell.core.lane_stats(identity.lane_id)
    return scheduler_pb2.LaneStats(
        instance_id=identity.lane_id,
        address=identity.address,
        num_running_seqs=figures.num_running_seqs,
        num_blocks=figures.num_blocks,
        num_free_blocks=figures.num_free_blocks,
        num_cached_blocks=figures.num_cached_blocks,
        num_quarantined_blocks=figures.num_quarantined_blocks,
        num_referenced_blocks=figures.num_referenced_blocks,
        num_allocated_slots=figures.num_allocated_slots,
        num_used_slots=figures.num_used_slots,
        num_steps_in_flight=figures.num_steps_in_flight,
        draining=figures.is_draining,
        last_step_ms=lane.driver.rates.last_step_ms,
    )
