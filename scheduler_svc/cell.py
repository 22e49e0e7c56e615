"""The cell: the core, the model that it serves, and the lanes to wake when there is work.

All failures of the core end here: an exception out of it that is not a request's own error means that its state can no
longer be trusted, so the process must end (workers keep their blocks, gateways submit again to its successor).
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from protos import common_pb2
from protos.block_hash import BlockHash
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    FinishReason,
    LaneId,
    LaneSpec,
    PrefixIndex,
    Request,
    RequestId,
    SchedulerError,
    Seal,
    StepPlan,
    StepResult,
    TokenRun,
)
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timing import Clock

LookElsewhere = Callable[[Callable[[], Sequence[BlockHash]]], None]
Route = Callable[[Sequence[TokenRun]], None]


class Cell:
    """One scheduler with its workers.

    Whatever the core returns for clients goes to `route`; whatever gives lanes work wakes them. `look_elsewhere` gets,
    for each request, what returns its block hashes while `submit` runs.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        index: PrefixIndex,
        clock: Clock,
        route: Route,
        look_elsewhere: LookElsewhere | None = None,
    ) -> None:
        self.settings = settings
        self.model: common_pb2.ModelInfo | None = None  # that of the first worker, once one has registered
        self.core = Scheduler(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_queued_seqs=settings.max_queued_requests,
                enable_prefix_caching=settings.enable_prefix_caching,
                policy=SchedulingPolicy(settings.scheduling_policy),
                precision=settings.precision(),
                fairness=settings.fairness(),
            ),
            index,
        )
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._route = route
        self._look_elsewhere = look_elsewhere
        self._wake_by_lane: dict[LaneId, Callable[[], None]] = {}
        self._awaited: set[LaneId] = set()  # nothing is bound before these are live, or the time is up
        self._awaited_until_ms = 0

    def loads(self) -> dict[LaneId, int]:
        """Return the live lanes and the sequences that run on each."""
        return {lane_id: self.core.num_rows(lane_id) for lane_id in self._wake_by_lane}

    def await_lanes(self, lane_ids: Iterable[LaneId], until_ms: int) -> None:
        """Bind no request before these lanes are live, or `until_ms`: one of them may hold what it needs.

        Has no effect once a sequence runs.
        """
        if not self.core.num_running_seqs:
            self._awaited, self._awaited_until_ms = set(lane_ids) - self._wake_by_lane.keys(), until_ms

    def add_lane(self, lane_id: LaneId, spec: LaneSpec, seals: Iterable[Seal], wake: Callable[[], None]) -> None:
        """Make a lane live with the blocks that its worker holds; `wake` is called whenever it may have work."""
        with self._guarded():
            runs = self.core.add_lane(lane_id, spec)
            self.core.restore(lane_id, seals)
        self._wake_by_lane[lane_id] = wake
        self._awaited.discard(lane_id)
        self._take(runs)

    def drop_lane(self, lane_id: LaneId) -> None:
        """Give a live lane's sequences back to the queue; not to be called for any other lane."""
        del self._wake_by_lane[lane_id]
        with self._guarded():
            runs = self.core.drop_lane(lane_id)
        self._take(runs)

    def drain_lane(self, lane_id: LaneId) -> bool:
        """Give a live lane nothing new; return whether it has nothing left to do."""
        with self._guarded():
            is_new = self.core.drain_lane(lane_id)
        if is_new:
            self.wake_lanes()  # what was left to this one
        return self.core.is_drained(lane_id)

    def submit(self, request: Request) -> None:
        """Queue a request, or attach to a known one again; raises SchedulerError."""
        with self._guarded():
            runs = self.core.submit(request)
            if self._look_elsewhere is not None and self.model is not None:
                block_size = self.model.block_size
                self._look_elsewhere(lambda: self.core.block_hashes(request.request_id, block_size))
        self._route(runs)
        self._wake_called()

    def abort(
        self, request_id: RequestId, sequence_idx: int | None = None, error: SchedulerError | None = None
    ) -> None:
        """End a request's sequences, or one of them; unknown ones are ignored. With an error they end with that."""
        with self._guarded():
            runs = self.core.abort(request_id, sequence_idx)
        if error is not None:
            runs = [run._replace(finish_reason=FinishReason.ERROR, error=error) for run in runs]
        self._take(runs)

    def expire(self) -> None:
        """End the requests whose deadline has passed; lets lanes plan again where the core waited for time to pass."""
        with self._guarded():
            runs = self.core.expire(self._clock())
        self._route(runs)
        if self._awaited and self._clock() >= self._awaited_until_ms:
            self._awaited = set()
        if runs or self.core.num_waiting_seqs:
            self.wake_lanes()

    def plan(self, lane_id: LaneId) -> StepPlan | None:
        """Return the lane's next step; None when there is nothing to do, or two steps are unapplied."""
        if self._awaited:
            return None
        with self._guarded():
            plan, runs = self.core.plan(lane_id, self._clock())
        if runs:
            self._route(runs)
        self._wake_called()
        return plan

    def apply(self, lane_id: LaneId, result: StepResult) -> None:
        """Take a step's result in and route what it gave to clients; the lane may have work then."""
        with self._guarded():
            runs = self.core.apply(lane_id, result)
        self._route(runs)
        self._wake_called()

    def wake_lanes(self) -> None:
        """Let every lane that may have something to plan look for it."""
        for lane_id, wake in self._wake_by_lane.items():
            if self.core.may_plan(lane_id):
                wake()

    def fail(self, error: BaseException) -> None:
        """Ask for the process's end; the first reason stands."""
        if not self.failed.done():
            self.failed.set_result(error)

    def _take(self, runs: Sequence[TokenRun]) -> None:
        self._route(runs)
        self.wake_lanes()

    def _wake_called(self) -> None:
        """Let the lanes that the core names look for work."""
        for lane_id in self.core.take_called():
            self._wake_by_lane[lane_id]()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except SchedulerError:
            raise
        except Exception as error:
            self.fail(error)
            raise
