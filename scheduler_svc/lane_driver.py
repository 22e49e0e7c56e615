"""Keeps one worker busy: steps out, results in, over one gRPC stream.

    plan k ──▶ send ─────────────────────▶ plan k+1 ──▶ send                     (writer; woken by submits and results)
                      worker runs k                        worker runs k+1
                                        apply k ◀── result      apply k+1 ◀──    (reader)

While the worker runs step k, step k+1 is planned and sent, so that the worker never waits for the scheduler. The core
bounds this to two unapplied steps; here they are kept until they are answered, because a broken stream is dialed
again once and then repeats them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from protos import worker_pb2
from protos.credentials import Credentials
from protos.worker_pb2_grpc import WorkerStub
from scheduler_svc import convert
from scheduler_svc.cell import Cell
from scheduler_svc.core.arena import lies_within
from scheduler_svc.core.types import Entry, LaneId, LaneSpec, Seal, StepStatus
from scheduler_svc.step_rates import StepRates
from scheduler_svc.timing import Clock, Timing

logger = logging.getLogger(__name__)

_Stream = grpc.aio.StreamStreamCall[worker_pb2.StepRequest, worker_pb2.StepResult]


class LaneLostError(Exception):
    """A lane cannot go on; the message says why."""


class LaneFencedError(LaneLostError):
    """The worker refuses this lane's steps: it obeys a newer epoch."""


@dataclass(frozen=True, slots=True)
class LaneIdentity:
    """Which worker process, at which address, in which epoch."""

    lane_id: LaneId
    address: str
    lane_epoch: int


@dataclass(frozen=True, slots=True)
class _SentStep:
    request: worker_pb2.StepRequest
    num_tokens: int


class WorkerLink:
    """A channel to a worker that can be dialed again. Every call carries the cluster token."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._metadata = credentials.metadata
        self._dial()

    def _dial(self) -> None:
        self._channel = self._credentials.dial(self._address)
        self._stub = WorkerStub(self._channel)

    async def health(self, timeout_ms: int) -> worker_pb2.HealthResponse:
        """Ask who answers; raises grpc.aio.AioRpcError."""
        return await self._stub.Health(worker_pb2.HealthRequest(), timeout=timeout_ms / 1000, metadata=self._metadata)

    async def manifest(self, identity: LaneIdentity, timeout_ms: int) -> list[Seal]:
        """Make the epoch the worker's current one and return its seals; raises AioRpcError, MalformedMessageError."""
        request = worker_pb2.ManifestRequest(instance_id=identity.lane_id, lane_epoch=identity.lane_epoch)
        seals: list[Seal] = []
        async for part in self._stub.Manifest(request, timeout=timeout_ms / 1000, metadata=self._metadata):
            if not isinstance(part, worker_pb2.ManifestPart):  # gRPC hands on None for what it cannot read
                raise convert.MalformedMessageError("a part of the manifest cannot be read")
            seals.extend(convert.seals_from_wire(part.seals))
        return seals

    def steps(self) -> _Stream:
        """Open a step stream."""
        return self._stub.Steps(metadata=self._metadata)

    async def redial(self, timeout_ms: int) -> None:
        """Replace the channel by a connected one; raises TimeoutError."""
        await self._channel.close()
        self._dial()
        await asyncio.wait_for(self._channel.channel_ready(), timeout_ms / 1000)

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()


class LaneDriver:
    """One lane from the fence to its end. `run` does the work; everything else may be called meanwhile."""

    def __init__(
        self, identity: LaneIdentity, spec: LaneSpec, link: WorkerLink, cell: Cell, timing: Timing, clock: Clock
    ) -> None:
        self.identity = identity
        self.rates = StepRates()
        # From the lane's addition to the core until its loss. The registry clears it when it drops the lane: what this
        # driver's tasks still find on their way out must not reach the core, where a successor may have the same id.
        self.is_live = False
        self.last_result_ms = clock()
        self._spec = spec
        self._link = link
        self._cell = cell
        self._timing = timing
        self._clock = clock
        self._unanswered: deque[_SentStep] = deque()
        self._oldest_since_ms = clock()
        self._redialed_since_result = False
        self._has_work = asyncio.Event()

    def wake(self) -> None:
        """Look for work: something was submitted, aborted or given back."""
        self._has_work.set()

    def overdue(self, now_ms: int) -> str | None:
        """Return why the oldest unanswered step is too late; None while it is not."""
        if not self._unanswered:
            return None
        limit_ms = self._step_limit_ms(self._unanswered[0].num_tokens)
        waited_ms = now_ms - self._oldest_since_ms
        if waited_ms <= limit_ms:
            return None
        step_id = self._unanswered[0].request.step_id
        return f"step {step_id} has not been answered for {waited_ms} ms (limit {limit_ms:.0f} ms)"

    def restart_timers(self, now_ms: int) -> None:
        """Begin all waiting anew: the scheduler's own loop was late."""
        self._oldest_since_ms = self.last_result_ms = now_ms

    async def run(self) -> None:
        """Fence, make the lane live and step it; raises LaneLostError when it cannot go on, and closes the link."""
        try:
            await self._bring_up()
            while True:
                error = await self._step_over(self._link.steps())
                await self._reach_again(error)
        finally:
            await self._link.close()

    async def _bring_up(self) -> None:
        try:
            seals = await self._link.manifest(self.identity, self._timing.manifest_ms)
        except (grpc.aio.AioRpcError, convert.MalformedMessageError) as error:
            raise LaneLostError(f"no manifest: {_text(error)}") from error
        _check_manifest(seals, self._spec)
        self._cell.add_lane(self.identity.lane_id, self._spec, seals, self.wake)
        self.is_live = True
        logger.info("lane %s at %s is live, %d blocks cached", self.identity.lane_id, self.identity.address, len(seals))

    async def _step_over(self, stream: _Stream) -> grpc.aio.AioRpcError | None:
        """Step until the stream ends; return its error, None when the worker ended it in order."""
        writer = asyncio.create_task(self._write_steps(stream))
        reader = asyncio.create_task(self._read_results(stream))
        try:
            await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and (failure := writer.exception()) is not None:
                raise failure
            return await reader
        finally:
            writer.cancel()
            reader.cancel()
            stream.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)

    async def _reach_again(self, error: grpc.aio.AioRpcError | None) -> None:
        """Dial the worker again after a broken stream; raises LaneLostError where that is not allowed or fails."""
        reason = _text(error) if error is not None else "the worker ended the step stream"
        if error is not None and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise LaneFencedError(reason)
        if self._redialed_since_result:
            raise LaneLostError(f"the step stream broke again without a result: {reason}")
        self._redialed_since_result = True
        logger.warning("lane %s: the step stream broke (%s), dialing again", self.identity.lane_id, reason)
        try:
            await self._link.redial(self._timing.redial_ms)
        except TimeoutError:
            raise LaneLostError(f"the step stream broke and the worker does not answer: {reason}") from None

    async def _write_steps(self, stream: _Stream) -> None:
        """Repeat what is unanswered, then send new steps. Returns when the stream is broken: the reader reports it."""
        try:
            for sent in list(self._unanswered):
                await stream.write(sent.request)
            while self.is_live:
                self._has_work.clear()
                plan = self._cell.plan(self.identity.lane_id)
                if plan is None:
                    await asyncio.sleep(0)  # a plan that wakes its own lane must not keep all others from running
                    await self._has_work.wait()
                    continue
                request = convert.step_to_wire(plan, self.identity.lane_epoch)
                if not self._unanswered:
                    self._oldest_since_ms = self._clock()
                # Noted before it is sent: if the stream breaks in between, it is repeated.
                self._unanswered.append(_SentStep(request, convert.num_scheduled_tokens(plan)))
                await stream.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def _read_results(self, stream: _Stream) -> grpc.aio.AioRpcError | None:
        try:
            while (result := await stream.read()) is not grpc.aio.EOF:
                if not isinstance(result, worker_pb2.StepResult):
                    raise LaneLostError("a result cannot be read")
                if not self.is_live:
                    return None
                self._take(result)
        except grpc.aio.AioRpcError as error:
            return error
        return None

    def _take(self, message: worker_pb2.StepResult) -> None:
        """Apply a result; raises LaneLostError for one that was not asked for."""
        if message.lane_epoch != self.identity.lane_epoch or not self._unanswered:
            raise LaneLostError(f"an unexpected result: epoch {message.lane_epoch}, step {message.step_id}")
        expected = self._unanswered[0]
        if message.step_id != expected.request.step_id:
            raise LaneLostError(f"the result of step {message.step_id} came in place of {expected.request.step_id}")
        try:
            result = convert.step_result_from_wire(message)
        except convert.MalformedMessageError as error:
            raise LaneLostError(str(error)) from error
        self._unanswered.popleft()
        self._redialed_since_result = False
        self._oldest_since_ms = self.last_result_ms = self._clock()
        # A step without rows (finished ids, seals) costs next to nothing, and says nothing about those with rows.
        if result.status is StepStatus.OK and expected.num_tokens:
            self.rates.record(expected.num_tokens, message.step_ms)
        self._cell.apply(self.identity.lane_id, result)
        self._has_work.set()

    def _step_limit_ms(self, num_tokens: int) -> float:
        predicted_ms = self.rates.predict_ms(num_tokens)
        if predicted_ms is None:
            return self._timing.unmeasured_step_deadline_ms
        return max(self._timing.min_step_deadline_ms, self._timing.step_deadline_factor * predicted_ms)


def _check_manifest(seals: Sequence[Seal], spec: LaneSpec) -> None:
    """Raise LaneLostError unless every seal names a block of the lane's arena that no other names."""
    named: set[Entry] = set()
    for seal in seals:
        if seal.entry in named or not lies_within(seal.entry, spec):
            raise LaneLostError(f"the manifest names entry {seal.entry} twice, or it lies outside the arena")
        named.add(seal.entry)


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
