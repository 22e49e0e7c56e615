"""What the core knows: lanes, requests, their sequences, the queue. Its other modules read and change this.

A sequence is in `seqs` until it ends, and besides in one place only: the queue, a lane's rows, or its job's unforked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from scheduler_svc.core.fairness import FairQueue
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.precision import NATIVE_ONLY, PrecisionPolicy
from scheduler_svc.core.router import Router
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.types import Counters, FairnessPolicy, Format, LaneId, PrefixIndex, RequestId, SeqId


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the cell; a lane's own limits count where they are smaller."""

    max_num_seqs: int = 128  # rows of a lane
    max_num_batched_tokens: int | None = None  # tokens a step; None: what the worker offers
    max_queued_seqs: int = 4096  # of one tenant; of all together twice as many
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = SchedulingPolicy.CONTINUOUS
    precision: PrecisionPolicy = NATIVE_ONLY  # formats of KV blocks
    fairness: FairnessPolicy = field(default_factory=FairnessPolicy)


@dataclass(slots=True, eq=False)
class State:
    """Every request, sequence and lane of a cell."""

    config: SchedulerConfig
    index: PrefixIndex
    queue: FairQueue
    counters: Counters = field(default_factory=Counters)
    lanes: dict[LaneId, Lane] = field(default_factory=dict)
    jobs: dict[RequestId, Job] = field(default_factory=dict)
    seqs: dict[SeqId, Seq] = field(default_factory=dict)
    arrivals: Iterator[int] = field(default_factory=lambda: count(1))
    seq_ids: Iterator[int] = field(default_factory=lambda: count(1))
    # The largest of any lane that was ever here: without a lane requests wait for one like it.
    max_model_len: int | None = None
    max_seq_tokens: dict[Format, int] = field(default_factory=dict)  # that a pool can hold, by a sequence's floor
    max_lane_rows: int | None = None
    router: Router = field(init=False)

    def __post_init__(self) -> None:
        self.router = Router(self.lanes, self.index, self.queue)

    @property
    def num_running_seqs(self) -> int:
        """Sequences that are rows of a lane."""
        return sum(lane.num_rows for lane in self.lanes.values())

    @property
    def num_waiting_seqs(self) -> int:
        """Sequences in the queue, and those that wait for their request's leader."""
        return len(self.seqs) - self.num_running_seqs

    def wait(self, seq: Seq) -> None:
        """Put a sequence that is nowhere else in the queue, and call a lane for it."""
        seq.state = SeqState.WAITING
        self.queue.add(seq)
        self.router.call_lane_for(seq)

    def check_integrity(self) -> None:
        """Raise AssertionError when any two parts of the state disagree. O(everything), for tests."""
        queued = set(self.queue)
        running = {seq for lane in self.lanes.values() for seq in lane.rows()}
        unforked = {seq for job in self.jobs.values() for seq in job.unforked}
        assert {s for s in self.seqs.values() if s.state is SeqState.WAITING} == queued
        assert {s for s in self.seqs.values() if s.state is SeqState.RUNNING} == running
        assert {s for s in self.seqs.values() if s.state is SeqState.UNFORKED} == unforked
        for job in self.jobs.values():
            live = [seq for seq in job.seqs if seq.state is not SeqState.FINISHED]
            assert 0 < len(live) == job.num_unfinished
            if job.search is not None:
                self._check_search(job)
                continue
            assert not job.unforked or any(not s.num_output_tokens for s in live if s not in unforked), "no leader"
        for seq in self.seqs.values():
            assert (seq.lane_id is not None) == (seq.state is SeqState.RUNNING)
            assert seq.state is SeqState.RUNNING or not (seq.table or seq.num_computed_tokens)
        self.queue.check_integrity(tuple(self.seqs.values()))
        for lane in self.lanes.values():
            lane.kv.check_integrity(lane.rows())
            assert lane.num_rows == len(lane.rows())
            uncomputed = [len(seq.token_ids) - seq.num_computed_tokens for seq in lane.prefilling.values()]
            assert lane.num_uncomputed_tokens == sum(uncomputed)
            assert lane.num_planned_tokens == sum(step.num_chunk_tokens for step in lane.in_flight)
            assert lane.num_free_rows >= 0
            assert set(lane.searches) == {seq.job for seq in lane.rows() if seq.job.search is not None}
            for seq in lane.beams.values():
                num_uncomputed = len(seq.token_ids) - seq.num_computed_tokens
                assert num_uncomputed in (0, 1), "a beam looks ahead"
                assert num_uncomputed or lane.in_flight or seq in seq.job.tops, "a beam's result never comes"
            for seq in lane.decoding.values():
                num_ahead = seq.num_computed_tokens + 1 - len(seq.token_ids)
                assert 0 <= num_ahead <= len(lane.in_flight), (
                    "a decoding row is one token ahead for each step in flight"
                )

    def _check_search(self, job: Job) -> None:
        """Every sequence of a search is a beam, all of them in one place, or a row that is left."""
        assert job.search is not None
        assert len(job.beams) == len(job.search.live)
        assert set(job.seqs) == {*job.beams, *job.unforked}
        assert len(job.seqs) == len(job.beams) + len(job.unforked) == job.search.width
        assert set(job.tops) < set(job.beams)
        assert any(seq.end is None for seq in job.seqs), "nobody wants its answers"
        first = job.beams[0]
        assert all((seq.state, seq.lane_id) == (first.state, first.lane_id) for seq in job.beams)
        for seq, beam in zip(job.beams, job.search.live, strict=True):
            assert seq.token_ids[seq.num_prompt_tokens :] == list(beam.token_ids)
