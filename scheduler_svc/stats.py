"""The cell's figures as a message."""

from collections.abc import Iterable

from protos import scheduler_pb2
from scheduler_svc.cell import Cell
from scheduler_svc.registry import Lane


def cell_stats(
    cell: Cell, lanes: Iterable[Lane], *, num_held_seqs: int, uptime_ms: int, is_draining: bool
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
        num_allocated_slots=figures.num_allocated_slots,
        num_used_slots=figures.num_used_slots,
        num_steps_in_flight=figures.num_steps_in_flight,
        last_step_ms=lane.driver.rates.last_step_ms,
    )
