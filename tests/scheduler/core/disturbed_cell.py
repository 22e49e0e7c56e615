"""A cell to which everything happens, and what its clients are owed all the same.

Each sequence's tokens are those of an undisturbed run, each once and in order, and it ends once, for a reason that it
has: all its tokens, an abort, a deadline that passed, a size that no worker holds, or the third loss in a row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from protos.block_hash import BlockHash
from scheduler_svc.core.losses import MAX_LOSSES
from scheduler_svc.core.mixed_kv import max_seq_tokens
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    Delivered,
    ErrorCode,
    FinishReason,
    LaneId,
    LaneSpec,
    Request,
    RequestId,
    SchedulerError,
    StepPlan,
    TokenRun,
)
from scheduler_svc.index.memory import MemoryIndex
from tests.scheduler.core.fake_worker import POISON_SEED, FakeWorker, WorkerDiedError
from tests.scheduler.core.helpers import Cell, Client, expected_of

MAX_TICKS = 20

Key = tuple[RequestId, int]  # of a sequence


class LyingIndex(MemoryIndex):
    """An index that says what it knows, nothing, or that lanes hold everything, one of them a lane that is not there.

    Whoever believes it must not be worse off than with less of the cache.
    """

    says = "truth"

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        if self.says == "nothing":
            return {}
        if self.says == "everything":
            return {LaneId(name): len(block_hashes) for name in ("w1", "w0", "gone")}
        return super().longest_prefix(block_hashes)


@dataclass
class DisturbedCell(Cell):
    """A cell whose workers, scheduler and gateway fail; it knows what each client is owed."""

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    specs: dict[LaneId, LaneSpec] = field(default_factory=dict)
    index: LyingIndex = field(default_factory=LyingIndex)
    draining: set[LaneId] = field(default_factory=set)
    aborted: set[Key] = field(default_factory=set)
    nums_losses: dict[Key, int] = field(default_factory=dict)  # at most so many in a row
    num_applied: int = 0
    num_deaths_left: int = 0  # so many workers more may die of poison
    _told: dict[Key, Delivered] = field(default_factory=dict)  # what gateways said that they have
    _judged: set[tuple[Key, ErrorCode]] = field(default_factory=set)  # ends that were deserved when they came first
    _expected: dict[Key, list[int]] = field(default_factory=dict)

    @classmethod
    def make(cls, config: SchedulerConfig, specs: dict[LaneId, LaneSpec]) -> "DisturbedCell":
        index = LyingIndex()
        cell = cls(Scheduler(config, index), config=config, specs=specs, index=index)
        for lane_id in specs:
            cell.join(lane_id)
        return cell

    # ---- requests

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._told.update({(request.request_id, idx): told for idx, told in request.delivered.items()})
        self._expect_deaths(request)

    def abort(self, name: str, sequence_idx: int | None = None) -> None:
        request = self.requests.get(RequestId(name))
        for idx in range(request.n if request else 0):
            if sequence_idx in (None, idx):
                self.aborted.add((RequestId(name), idx))
        super().abort(name, sequence_idx)

    def expire(self, elapsed_ms: int = 0) -> None:
        super().expire(elapsed_ms)
        for (request_id, _), client in self.clients.items():
            assert client.end is not None or not self._is_late(self.requests[request_id]), "its deadline passed"

    def lose_delivered(self, name: str, num_kept_tokens: int) -> None:
        """Break a gateway's session: what it was sent last never comes, ends neither, and it submits the request again.

        Of a search nothing comes. What a gateway once said that it has it keeps.
        """
        request = self.requests[RequestId(name)]
        nums_losses = self.nums_losses.copy()
        for idx in range(request.n):
            client = self.clients.get((request.request_id, idx))
            told = self._told.get((request.request_id, idx), Delivered(()))
            if client is not None and told.finish_reason is None:
                client.end = None
                num_kept = num_kept_tokens if request.beam_search is None else 0
                del client.token_ids[max(num_kept, len(told.token_ids)) :]
        self._resubmit(request)
        self.nums_losses = nums_losses  # tokens that come again end no row of losses

    def _resubmit(self, request: Request) -> None:
        """Submit a request again with what its clients have.

        It was let in, so it is not refused now, unless that is the end that its clients lost.
        """
        delivered = {}
        for idx in range(request.n):
            client = self.clients.get((request.request_id, idx))
            if client is None:  # it had its answer when the request came first
                delivered[idx] = request.delivered[idx]
            elif client.token_ids or client.end is not None:
                reason = client.end.finish_reason if client.end is not None else None
                delivered[idx] = Delivered(tuple(client.token_ids), reason)
        self._told.update({(request.request_id, idx): told for idx, told in delivered.items()})
        self._expect_deaths(request)
        try:
            self.take(self.scheduler.submit(replace(request, is_resubmit=True, delivered=delivered)))
        except SchedulerError as error:
            self._take_refusal(request, error)

    def _take_refusal(self, request: Request, error: SchedulerError) -> None:
        for idx in range(request.n):
            client = self.clients.get((request.request_id, idx))
            if client is not None and client.end is None:
                assert ((request.request_id, idx), error.code) in self._judged, "it was let in before"
                end = TokenRun(request.request_id, idx, len(client.token_ids), (), (), FinishReason.ERROR, error)
                self.take([end])

    def _expect_deaths(self, request: Request) -> None:
        self.num_deaths_left += MAX_LOSSES * request.n * (request.sampling == POISON_SEED)

    # ---- workers

    def join(self, lane_id: LaneId, worker: FakeWorker | None = None) -> None:
        """Have a new worker register, or one with what it has in its arena."""
        spec = self.specs[lane_id]
        self.add_lane(lane_id, spec)
        if worker is not None:
            self.workers[lane_id] = worker
            self.scheduler.restore(lane_id, worker.fence())
            self.scheduler.check_integrity()

    def plan(self, name: str = "w0") -> StepPlan | None:
        num_runs = len(self.runs)
        step = super().plan(name)
        if LaneId(name) in self.draining:
            assert step is None or not step.resumed_rows
            assert all(run.finish_reason for run in self.runs[num_runs:]), "a request begins on a lane that drains"
        return step

    def apply(self, name: str = "w0", *, fails: bool = False, failing_row_idx: int | None = None) -> None:
        if fails or failing_row_idx is not None:
            self._count_loss()
        self.num_applied += 1
        step = self.in_flight[LaneId(name)][0]
        try:
            super().apply(name, fails=fails, failing_row_idx=failing_row_idx)
        except WorkerDiedError:
            self.num_deaths_left -= 1
            assert self.num_deaths_left >= 0, "poison kills more workers than it must"
            self.in_flight[LaneId(name)].appendleft(step)
            self.drop_lane(name)
            self.join(LaneId(name))

    def drop_lane(self, name: str) -> None:
        if self.in_flight[LaneId(name)]:
            self._count_loss()
        self.draining.discard(LaneId(name))
        super().drop_lane(name)

    def run_to_end(self) -> None:
        """Run until nothing is left to do.

        A lane that planned nothing plans again at the next tick: what another preempted meanwhile may fit there.
        """
        for _ in range(MAX_TICKS):
            self.run_until_idle()
        super().run_to_end()

    def return_worker(self, name: str, num_run: int) -> None:
        """Have a worker that was given up register again, after it ran some of the steps that nobody waits for."""
        worker = self.workers[LaneId(name)]
        self._run_unheard(LaneId(name), num_run)
        self.drop_lane(name)
        self.join(LaneId(name), worker)

    def drain(self, name: str) -> None:
        self.scheduler.drain_lane(LaneId(name))
        self.draining.add(LaneId(name))
        self.scheduler.check_integrity()

    def leave(self) -> None:
        """Let the drained workers go. Nobody loses anything by it."""
        for lane_id in sorted(self.draining):
            if self.scheduler.is_drained(lane_id):
                assert not self.in_flight[lane_id]
                num_losses = self.scheduler.counters.worker_losses
                self.drop_lane(lane_id)
                assert self.scheduler.counters.worker_losses == num_losses

    def restart_scheduler(self, num_run: int, returns: Callable[[LaneId], bool], *, requests_first: bool) -> None:
        """Put a new scheduler in the place of one that died: workers come back with what they hold, requests too."""
        for lane_id in self.workers:
            self._run_unheard(lane_id, num_run)
        workers, self.workers, self.in_flight = self.workers, {}, {}
        self.draining.clear()
        self.nums_losses.clear()
        self.index = LyingIndex()
        self.scheduler = Scheduler(self.config, self.index)
        live = dict.fromkeys(request_id for (request_id, _), client in self.clients.items() if client.end is None)
        for request_id in live if requests_first else ():
            self._resubmit(self.requests[request_id])
        for lane_id, worker in workers.items():
            if returns(lane_id):
                self.join(lane_id, worker)
        for request_id in () if requests_first else live:
            self._resubmit(self.requests[request_id])

    def _run_unheard(self, lane_id: LaneId, num_run: int) -> None:
        steps = self.in_flight[lane_id]
        for step in list(steps)[:num_run]:
            try:
                self.workers[lane_id].run(step)
            except WorkerDiedError:  # it is another that comes back
                self.workers[lane_id] = FakeWorker(self.specs[lane_id].block_size)
                return

    def _count_loss(self) -> None:
        for key in self.clients:
            self.nums_losses[key] = self.nums_losses.get(key, 0) + 1

    # ---- what clients are owed

    def take(self, runs: Iterable[TokenRun]) -> None:
        runs = list(runs)
        for run in runs:
            expected = self.expected(self.requests[run.request_id], run.sequence_idx)
            end = run.first_token_idx + len(run.token_ids)
            assert list(run.token_ids) == expected[run.first_token_idx : end], "not the text of an undisturbed run"
        super().take(runs)
        for run in runs:
            if run.finish_reason is not None:
                self._check_end(run)
            if run.token_ids:
                self.nums_losses[run.request_id, run.sequence_idx] = 0

    def check_requests(self) -> None:
        """The scheduler has the requests with a sequence that has not ended, and no others."""
        live = {request_id for (request_id, _), client in self.clients.items() if client.end is None}
        assert self.scheduler.request_ids() == live

    def expected(self, request: Request, sequence_idx: int = 0) -> list[int]:
        """Return the tokens of an undisturbed run."""
        key = request.request_id, sequence_idx
        if key not in self._expected:
            room = min(spec.max_model_len for spec in self.specs.values()) - len(request.prompt_token_ids)
            ending = replace(request.ending, max_tokens=max(1, min(request.ending.max_tokens, room)))
            self._expected[key] = expected_of(replace(request, ending=ending), sequence_idx)
        return self._expected[key]

    def _check_end(self, run: TokenRun) -> None:
        key = run.request_id, run.sequence_idx
        request, client = self.requests[run.request_id], self.clients[key]
        if run.error is None:
            if run.finish_reason is FinishReason.ABORT:
                assert key in self.aborted
            else:
                assert client.token_ids == self.expected(request, run.sequence_idx), "it ended before its time"
            return
        if (key, run.error.code) not in self._judged:
            self._check_error(key, request, client, run.error.code)
            self._judged.add((key, run.error.code))

    def _check_error(self, key: Key, request: Request, client: Client, code: ErrorCode) -> None:
        if code is ErrorCode.DEADLINE_EXCEEDED:
            assert self._is_late(request)
        elif code is ErrorCode.INTERNAL:
            assert self.nums_losses.get(key, 0) >= MAX_LOSSES, "it was not in flight at so many losses in a row"
        else:
            assert code is ErrorCode.INVALID_ARGUMENT
            assert self._is_too_large(request, len(client.token_ids)), "a worker holds it"

    def _is_late(self, request: Request) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= self.now_ms

    def _is_too_large(self, request: Request, num_output_tokens: int) -> bool:
        """Return whether no worker that is there has room for the next token; of a search, for its beams."""
        if request.beam_search is not None:
            return True
        precision = self.config.precision
        floor = precision.limited_to(request.kv_precision_floor).floor
        num_tokens = len(request.prompt_token_ids) + num_output_tokens + 1
        specs = [self.specs[lane_id] for lane_id in self.workers]
        return all(num_tokens > min(spec.max_model_len, max_seq_tokens(spec, precision)[floor]) for spec in specs)
