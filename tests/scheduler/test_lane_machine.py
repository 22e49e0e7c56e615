"""Any order of what workers and their streams do: no token is missing or comes twice, every request ends once.

The registry, the lane drivers, the cell and its core are real. Results come late, twice, from another epoch or never;
workers stand still, go on, restart and leave. There is no network: see `wireless`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar
from unittest import mock

import grpc.aio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos import common_pb2, scheduler_pb2
from protos.channel import Refusals
from protos.credentials import Credentials
from scheduler_svc import convert
from scheduler_svc.cell import Cell
from scheduler_svc.core.losses import MAX_LOSSES
from scheduler_svc.core.types import ErrorCode, FinishReason, RequestId, TokenRun
from scheduler_svc.index.memory import MemoryIndex
from scheduler_svc.registry import Registry
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.timing import Timing

from .core.helpers import Client
from .fake_worker import EOS_TOKEN_ID, expected_output
from .wireless import WirelessLink, WirelessWorker, rpc_error

TIMING = replace(Timing(), min_step_deadline_ms=2000, unmeasured_step_deadline_ms=5000)

T = TypeVar("T")

choices = st.integers(0, 7)


class LaneMachine(RuleBasedStateMachine):
    """Two workers at most; each rule is one thing that happens, after which the event loop runs until it is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now_ms = 0
        self.workers: list[WirelessWorker] = []  # also dead ones
        self.clients: dict[tuple[RequestId, int], Client] = {}
        self.expected: dict[tuple[RequestId, int], list[int]] = {}
        self.aborted: set[RequestId] = set()
        self.num_failures = 0
        self._patches = ExitStack()
        self._patches.enter_context(mock.patch("scheduler_svc.registry.WorkerLink", self._dial))

    @initialize(num_slabs=st.integers(2, 4))
    def start(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs
        self.loop.run_until_complete(self._start())
        self.worker_starts()

    async def _start(self) -> None:
        self.cell = Cell(SchedulerSettings(), MemoryIndex(), lambda: self.now_ms, self._route)
        self.registry = Registry(
            self.cell, TIMING, lambda: self.now_ms, Credentials("", None), Refusals(), on_model=lambda: None
        )

    # ---- requests

    @rule(seed=st.integers(0, 3), num_tokens=st.integers(1, 60), max_tokens=st.integers(1, 30), n=st.integers(1, 2))
    def submit(self, seed: int, num_tokens: int, max_tokens: int, n: int) -> None:
        request_id = RequestId(f"r{len(self.expected)}")
        prompt = [3 + seed, *range(100, 100 + num_tokens)]
        sampling = common_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=max_tokens)
        submit = scheduler_pb2.Submit(request_id=request_id, token_ids=prompt, sampling=sampling, n=n)
        assert self.cell.model is not None
        for idx in range(n):
            self.clients[request_id, idx] = Client()
            self.expected[request_id, idx] = expected_output(prompt, max_tokens, idx)
        request = convert.request_from_wire(submit, self.cell.model, b"salt", self.now_ms)
        self._do(lambda: self.cell.submit(request))

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 20))
    def abort(self, choice: int) -> None:
        request_id, _ = sorted(self.expected)[choice % len(self.expected)]
        self.aborted.add(request_id)
        self._do(lambda: self.cell.abort(request_id))

    # ---- results

    @rule(num_steps=st.integers(1, 12))
    def workers_answer(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for worker in self._awake():
                self._answer(worker)
            self._settle()

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def result_is_lost_with_its_stream(self, choice: int) -> None:
        """The worker has run the step: it is asked for it again, and answers from what it kept."""
        worker = self._pick(choice)
        if worker.step() is not None:
            worker.lines[-1].end(rpc_error(grpc.StatusCode.UNAVAILABLE, "the stream broke"))

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def stream_ends(self, choice: int) -> None:
        worker = self._pick(choice)
        if worker.lines:
            worker.lines[-1].end(grpc.aio.EOF)

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def result_comes_twice(self, choice: int) -> None:
        worker = self._pick(choice)
        result = worker.step()
        if result is not None:
            worker.lines[-1].answer(result)
            worker.lines[-1].answer(result)

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def result_of_an_older_epoch_comes(self, choice: int) -> None:
        worker = self._pick(choice)
        result = worker.step()
        if result is not None:
            result.lane_epoch -= 1
            result.sampled.token_ids[:] = [EOS_TOKEN_ID] * len(result.sampled.token_ids)
            worker.lines[-1].answer(result)

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def step_fails(self, choice: int) -> None:
        worker = self._pick(choice)
        worker.fails_next_step = True
        self.num_failures += 1
        self._answer(worker)
        worker.fails_next_step = False

    # ---- workers

    @precondition(lambda self: sum(not worker.is_dead for worker in self.workers) < 2)
    @rule()
    def worker_starts(self) -> None:
        name = f"worker-{len(self.workers)}"
        self.workers.append(WirelessWorker(name, self.num_slabs, address=f"{name}:1"))
        self._register(self.workers[-1])

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def worker_dies(self, choice: int) -> None:
        worker = self._pick(choice)
        worker.is_dead = True
        for line in worker.lines:
            line.end(rpc_error(grpc.StatusCode.UNAVAILABLE, "the connection is gone"))

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def worker_stands_still(self, choice: int) -> None:
        self._pick(choice).is_still = True

    @rule()
    def workers_go_on(self) -> None:
        """With what they were sent before; then they see whether anybody still knows them."""
        for worker in self.workers:
            if worker.is_still:
                worker.is_still = False
                while self._answer(worker):
                    pass
        self._heartbeats()

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def worker_begins_a_new_epoch(self, choice: int) -> None:
        self._register(self._pick(choice))

    @precondition(lambda self: self._awake())
    @rule(choice=choices)
    def worker_drains(self, choice: int) -> None:
        self._pick(choice).is_draining = True

    @rule(elapsed_ms=st.sampled_from([100, 1500, 4000]))
    def time_passes(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self._heartbeats()
        self._do(self.registry.judge)
        self._do(self.cell.expire)

    # ---- what holds

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "registry"):
            return
        self._settle()
        assert not self.cell.failed.done(), self.cell.failed
        self.cell.core.check_integrity()
        live = {lane.driver.identity.lane_id for lane in self.registry.lanes if lane.driver.is_live}
        assert live == self.cell.loads().keys()
        assert self.cell.core.request_ids() == {key[0] for key, client in self.clients.items() if client.end is None}
        assert [worker.mistakes for worker in self.workers if worker.mistakes] == []

    def teardown(self) -> None:
        try:
            if hasattr(self, "registry"):
                self._run_to_end()
        finally:
            if hasattr(self, "registry"):
                self.loop.run_until_complete(self.registry.close())
            self._patches.close()
            self.loop.close()

    def _run_to_end(self) -> None:
        self.workers_go_on()
        self.worker_starts()
        for _ in range(500):
            if all(client.end is not None for client in self.clients.values()):
                break
            self.time_passes(100)
            self.workers_answer(4)
        self.workers_answer(4)
        self.books_agree()
        assert all(client.end is not None for client in self.clients.values()), "a request never ended"
        assert self.cell.core.num_running_seqs == self.cell.core.num_waiting_seqs == 0
        for lane_id in self.cell.loads():
            stats = self.cell.core.lane_stats(lane_id)
            assert not any(stats.num_referenced_blocks), "a block leaked"

    def _route(self, runs: Sequence[TokenRun]) -> None:
        for run in runs:
            key = run.request_id, run.sequence_idx
            client, expected = self.clients[key], self.expected[key]
            client.take(run)
            assert client.token_ids == expected[: len(client.token_ids)], "not the text of an undisturbed run"
            if run.finish_reason is FinishReason.ABORT:
                assert run.request_id in self.aborted
            elif run.error is not None:
                assert run.error.code is ErrorCode.INTERNAL
                assert self.cell.core.counters.worker_losses + self.num_failures >= MAX_LOSSES
            elif run.finish_reason is not None:
                assert client.token_ids == expected

    # ---- how it is driven

    def _dial(self, address: str, credentials: Credentials) -> WirelessLink:
        return WirelessLink(next(worker for worker in self.workers if worker.address == address))

    def _awake(self) -> list[WirelessWorker]:
        return [worker for worker in self.workers if not worker.is_still and not worker.is_dead]

    def _pick(self, choice: int) -> WirelessWorker:
        return self._awake()[choice % len(self._awake())]

    def _answer(self, worker: WirelessWorker) -> bool:
        result = worker.step()
        if result is not None:
            worker.lines[-1].answer(result)
        return result is not None

    def _register(self, worker: WirelessWorker) -> None:
        self.loop.run_until_complete(self.registry.register(worker.registration()))

    def _heartbeats(self) -> None:
        for worker in self._awake():
            request = scheduler_pb2.HeartbeatRequest(
                instance_id=worker.instance_id, lane_epoch=worker.lane_epoch, draining=worker.is_draining
            )
            response = self._do(partial(self.registry.heartbeat, request))
            if response.drained or (worker.is_draining and not response.known):
                worker.is_dead = True
            elif not response.known:
                self._register(worker)

    def _do(self, act: Callable[[], T]) -> T:
        """Do something that expects to run in the event loop."""

        async def do() -> T:
            return act()

        return self.loop.run_until_complete(do())

    def _settle(self) -> None:
        """Let every task go on until all wait for something that a rule must do."""
        self.loop.run_until_complete(_turns(20))


async def _turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


LaneMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLanes = LaneMachine.TestCase
