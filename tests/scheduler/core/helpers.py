"""Builders for the core's tests: requests, a cell with fake workers, and the collected output of its clients."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.block_hash import root_hash
from scheduler_svc.core.fairness import FairQueue
from scheduler_svc.core.policy import SchedulingPolicy
from scheduler_svc.core.precision import NATIVE_ONLY, PrecisionPolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import (
    BeamParams,
    Delivered,
    EndingRules,
    Entry,
    FairnessPolicy,
    FinishReason,
    Format,
    LaneId,
    LaneSpec,
    Request,
    RequestId,
    StepPlan,
    TokenRun,
)
from scheduler_svc.index.memory import MemoryIndex
from tests.scheduler.core.fake_model import BeamSampling, expected_beams, expected_tokens
from tests.scheduler.core.fake_worker import FakeWorker

BLOCK_SIZE = 4


def make_request(
    name: str,
    prompt: Iterable[int],
    *,
    max_tokens: int = 8,
    n: int = 1,
    beams: BeamParams | None = None,
    seed: int = 0,
    stops: Iterable[int] = (),
    min_tokens: int = 0,
    tenant: str = "",
    priority: int = 0,
    deadline_ms: int | None = None,
    salt: str = "",
    skip_cache_read: bool = False,
    floor: Format | None = None,
    is_resubmit: bool = False,
    delivered: dict[int, Delivered] | None = None,
) -> Request:
    return Request(
        RequestId(name),
        tuple(prompt),
        EndingRules(max_tokens, min_tokens, frozenset(stops)),
        seed if beams is None else BeamSampling(seed, 2 * n),
        root_hash(b"model", b"tenant" + tenant.encode(), salt),
        n=n,
        beam_search=beams,
        tenant=tenant,
        priority=priority,
        deadline_ms=deadline_ms,
        skip_cache_read=skip_cache_read,
        kv_precision_floor=floor,
        is_resubmit=is_resubmit or bool(delivered),
        delivered=delivered or {},
    )


@dataclass
class Client:
    """What came back for one sequence. It checks what every client relies on: no gap, no repeat, one end."""

    token_ids: list[int] = field(default_factory=list)
    end: TokenRun | None = None

    def take(self, run: TokenRun) -> None:
        assert self.end is None, "something came after the end"
        assert run.first_token_idx == len(self.token_ids), "a token is missing or came twice"
        self.token_ids += run.token_ids
        if run.finish_reason is not None:
            self.end = run


@dataclass
class Cell:
    """A scheduler, fake workers, and all clients' output. Integrity is checked after every operation."""

    scheduler: Scheduler
    workers: dict[LaneId, FakeWorker] = field(default_factory=dict)
    in_flight: dict[LaneId, deque[StepPlan]] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    clients: dict[tuple[RequestId, int], Client] = field(default_factory=dict)
    runs: list[TokenRun] = field(default_factory=list)  # all that came back
    now_ms: int = 0

    def take(self, runs: Iterable[TokenRun]) -> None:
        for run in runs:
            self.runs.append(run)
            self.clients[run.request_id, run.sequence_idx].take(run)
        self.scheduler.check_integrity()

    def add_lane(self, name: str, spec: LaneSpec) -> None:
        lane_id = LaneId(name)
        self.workers[lane_id] = FakeWorker(spec.block_size)
        self.in_flight[lane_id] = deque()
        self.take(self.scheduler.add_lane(lane_id, spec))

    def drop_lane(self, name: str) -> None:
        lane_id = LaneId(name)
        del self.workers[lane_id], self.in_flight[lane_id]
        self.take(self.scheduler.drop_lane(lane_id))

    def submit(self, request: Request) -> None:
        runs = self.scheduler.submit(request)
        self.requests[request.request_id] = request
        for sequence_idx in range(request.n):
            delivered = request.delivered.get(sequence_idx)
            if delivered is not None and delivered.finish_reason is not None:
                continue  # nothing more may come
            client = Client(list(delivered.token_ids) if delivered else [])
            self.clients.setdefault((request.request_id, sequence_idx), client)
        self.take(runs)

    def abort(self, name: str, sequence_idx: int | None = None) -> None:
        self.take(self.scheduler.abort(RequestId(name), sequence_idx))

    def plan(self, name: str = "w0") -> StepPlan | None:
        plan, runs = self.scheduler.plan(LaneId(name), self.now_ms)
        if plan is not None:
            self.in_flight[LaneId(name)].append(plan)
        self.take(runs)
        return plan

    def apply(self, name: str = "w0", *, fails: bool = False, failing_row_idx: int | None = None) -> None:
        """Have the worker run the oldest step in flight, and take its result; see FakeWorker.run."""
        lane_id = LaneId(name)
        step = self.in_flight[lane_id].popleft()
        result = self.workers[lane_id].run(step, fails=fails, failing_row_idx=failing_row_idx)
        self.take(self.scheduler.apply(lane_id, result))

    def expire(self, elapsed_ms: int = 0) -> None:
        """Let time pass, and have what it ends end."""
        self.now_ms += elapsed_ms
        self.take(self.scheduler.expire(self.now_ms))

    def run_to_end(self) -> None:
        """Run until nothing is left to do."""
        self.run_until_idle()
        assert not self.scheduler.request_ids(), "requests never ended"
        assert self.scheduler.num_waiting_seqs == self.scheduler.num_running_seqs == 0

    def run_until_idle(self, max_steps: int = 3000) -> None:
        """Keep two steps in flight on every lane until there is none to plan."""
        for _ in range(max_steps):
            for lane_id in list(self.workers):
                while self.plan(lane_id) is not None:
                    pass
            if not any(self.in_flight.values()):
                break
            for lane_id in [lane_id for lane_id, steps in self.in_flight.items() if steps]:
                self.apply(lane_id)

    @property
    def queue(self) -> FairQueue:
        """The tenants' books, which the core shows to nobody."""
        return self.scheduler._state.queue

    def output(self, name: str, sequence_idx: int = 0) -> list[int]:
        return self.clients[RequestId(name), sequence_idx].token_ids

    def end(self, name: str, sequence_idx: int = 0) -> TokenRun:
        end = self.clients[RequestId(name), sequence_idx].end
        assert end is not None
        return end

    def check_texts(self) -> None:
        """Every sequence that was not cut short has the text of an undisturbed run."""
        for (request_id, sequence_idx), client in self.clients.items():
            request = self.requests[request_id]
            wanted = expected_of(request, sequence_idx)
            assert client.token_ids == wanted[: len(client.token_ids)]
            if client.end and client.end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert client.token_ids == wanted


def expected_of(request: Request, sequence_idx: int = 0) -> list[int]:
    prompt, ending = list(request.prompt_token_ids), request.ending
    if isinstance(request.sampling, BeamSampling):
        assert request.beam_search is not None
        seed, penalty = request.sampling.seed, request.beam_search.length_penalty
        return expected_beams(prompt, seed, request.n, penalty, ending.max_tokens, ending.stop_token_ids)[sequence_idx]
    assert isinstance(request.sampling, int)
    return expected_tokens(prompt, request.sampling, sequence_idx, ending.max_tokens, ending.stop_token_ids)


def make_spec(num_blocks: int = 64, *, max_num_seqs: int = 8, budget: int = 16, max_model_len: int = 1000) -> LaneSpec:
    return LaneSpec(num_blocks, 16, BLOCK_SIZE, max_num_seqs, budget, max_model_len)


def make_mixed_spec(
    num_slabs: int = 32, *, max_num_seqs: int = 8, budget: int = 16, max_model_len: int = 1000
) -> LaneSpec:
    """Return a lane with small slabs: of 2 native blocks, 3 int8 or 5 int4 ones."""
    quantized = {Format.INT8: 3, Format.INT4: 5}
    return LaneSpec(2 * num_slabs, 2, BLOCK_SIZE, max_num_seqs, budget, max_model_len, quantized)


def make_cell(
    spec: LaneSpec | None = None,
    *,
    num_lanes: int = 1,
    policy: SchedulingPolicy = SchedulingPolicy.CONTINUOUS,
    precision: PrecisionPolicy = NATIVE_ONLY,
    max_queued_seqs: int = 1000,
    prefix_caching: bool = True,
    fairness: FairnessPolicy | None = None,
) -> Cell:
    config = SchedulerConfig(
        policy=policy,
        precision=precision,
        max_queued_seqs=max_queued_seqs,
        enable_prefix_caching=prefix_caching,
        fairness=fairness or FairnessPolicy(),
    )
    cell = Cell(Scheduler(config, MemoryIndex()))
    for i in range(num_lanes):
        cell.add_lane(f"w{i}", spec or make_spec())
    return cell


def plan(cell: Cell, name: str = "w0") -> StepPlan:
    """Plan a step where there is something to do."""
    made = cell.plan(name)
    assert made is not None
    return made


def entries(*block_ids: int) -> list[Entry]:
    """Return the entries of native blocks."""
    return [Entry(block_id * 8) for block_id in block_ids]
