"""The gateway's one session with the scheduler, kept up over breaks of the connection and restarts of the scheduler.

While the scheduler is away requests wait. On reconnecting the gateway names the requests that it still has (Hello) and
submits each again with what was delivered, so that streams go on where they stopped.
"""

import asyncio
import logging
import secrets

import grpc
import grpc.aio

from gateway.errors import UnavailableError
from gateway.generation import Generation, Inbox
from gateway.link import Link
from protos import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from protos.channel import CHANNEL_OPTIONS
from protos.credentials import Credentials

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 1.0
_CALL_TIMEOUT_S = 1.0
_MODEL_POLL_S = 0.25  # until a worker has registered
_MODEL_REFRESH_S = 5.0  # workers come and go, and with them the cell's limits
_DEADLINE_CHECK_S = 0.5
# The scheduler ends a request at its deadline; the gateway does so only when the scheduler is away.
_DEADLINE_GRACE_S = 1.0
_NUM_KEPT_ABORTS = 4096
# After the scheduler has refused a tenant's request, its next ones are refused here for this long, or until one has
# started.
REFUSAL_HOLDS_S = 0.25

# Each connection is a new one: a dead TCP connection must not come back out of gRPC's pool.
_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class SchedulerSession:
    """Submits and aborts requests, and feeds their inboxes. Everything runs in one event loop."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address = address
        self._credentials = credentials
        self._metadata = credentials.metadata
        self._gateway_id = f"gateway-{secrets.token_hex(8)}"
        self._session_number = 0
        self._generations: dict[str, Generation] = {}
        self._aborted_ids: dict[str, None] = {}  # in this connection, the latest last; a dict, for its order
        self._link: Link | None = None
        self._stub: scheduler_pb2_grpc.SchedulerAsyncStub | None = None
        self._cell = scheduler_pb2.GetModelResponse()
        self._is_announced = False
        self._last_complaint = ""
        self._refusals_s: dict[str, float] = {}  # when the queue was full, by tenant, the latest last

    @property
    def is_connected(self) -> bool:
        """Whether the session is up."""
        return self._link is not None and self._link.was_heard

    @property
    def num_unstarted(self) -> int:
        """How many submitted requests have had no token yet."""
        return sum(not generation.has_started for generation in self._generations.values())

    def num_unstarted_of(self, tenant: str) -> int:
        """Return how many of a tenant's submitted requests have had no token yet."""
        return sum(
            generation.tenant == tenant and not generation.has_started for generation in self._generations.values()
        )

    def was_refused(self, tenant: str) -> bool:
        """Return whether the queue was full a moment ago for a tenant of whom no request has started since."""
        refusal_s = self._refusals_s.get(tenant)
        return refusal_s is not None and _now_s() - refusal_s < REFUSAL_HOLDS_S

    @property
    def cell(self) -> scheduler_pb2.GetModelResponse | None:
        """The model and limits of the cell as last heard; None before a worker has ever registered."""
        return self._cell if self._cell.HasField("model") else None

    def require_cell(self) -> scheduler_pb2.GetModelResponse:
        """Return the model and limits of the cell. Raises UnavailableError before a worker has registered."""
        if self.cell is None:
            raise UnavailableError("The server is starting: no worker has registered yet.")
        return self.cell

    def submit(self, submit: scheduler_pb2.Submit, inbox: Inbox, deadline_s: float | None) -> Generation:
        """Send a request to the scheduler, now or as soon as it is there; its tokens go to `inbox`."""
        generation = Generation(submit, inbox, deadline_s)
        self._generations[generation.request_id] = generation
        if self._link is not None:
            self._link.send(generation.submit_message(_now_s()))
        return generation

    def abort(self, generation: Generation) -> None:
        """Forget a request and have the scheduler end it; nothing more comes of it. Idempotent."""
        known = self._generations.pop(generation.request_id, None)
        if known is not None:
            self._abort_unheld(generation.request_id)

    def end_sequence(self, generation: Generation, index: int) -> None:
        """Have the scheduler end one sequence; only its terminal event comes of it from now on."""
        if not generation.end_sequence(index):
            return
        if self._link is not None:
            self._link.send(_abort_message(generation.request_id, index))
        else:
            generation.lose_scheduler(_now_s())
            self._drop_if_over(generation)

    async def stats(self) -> scheduler_pb2.CellStats | None:
        """Return the cell's figures; None while the scheduler is away."""
        if self._stub is None:
            return None
        try:
            request = scheduler_pb2.GetStatsRequest()
            stats: scheduler_pb2.CellStats = await self._stub.GetStats(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
        except (grpc.aio.AioRpcError, grpc.aio.UsageError):
            return None
        except asyncio.CancelledError:
            # The channel was closed under the call; or somebody cancelled this task, which is another matter.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        return stats

    async def run(self) -> None:
        """Keep the session up until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_deadlines())
            tasks.create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                was_heard, reason = await self._connect_once()
            except Exception:
                # Our own fault. A new session submits every request anew, so none of them hangs.
                logger.exception("the session failed")
                was_heard, reason = False, "its messages cannot be handled"
            self._complain(reason)
            backoff_s = _FIRST_BACKOFF_S if was_heard else min(2 * backoff_s, _LONGEST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    async def _connect_once(self) -> tuple[bool, str]:
        """Serve one connection; return whether the scheduler was heard in it, and why it ended."""
        async with self._credentials.dial(self._address, _CHANNEL_OPTIONS) as channel:
            stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)
            self._session_number += 1
            link = Link(stub, self._metadata, self._accept)
            self._greet(link)
            self._link, self._stub = link, stub
            refresher = asyncio.create_task(self._keep_cell_fresh(stub))
            try:
                reason = await link.run()
            finally:
                refresher.cancel()
                self._link = self._stub = None
                self._is_announced = False
                self._aborted_ids.clear()
                self._lose_scheduler(link.was_heard)
            return link.was_heard, reason if link.was_heard else self._credentials.explain(reason)

    def _greet(self, link: Link) -> None:
        hello = scheduler_pb2.Hello(
            gateway_id=self._gateway_id, session_number=self._session_number, request_ids=list(self._generations)
        )
        link.send(scheduler_pb2.ClientMessage(hello=hello))
        now_s = _now_s()
        for generation in self._generations.values():
            link.send(generation.submit_message(now_s))

    def _accept(self, message: scheduler_pb2.ServerMessage) -> None:
        if not self._is_announced:
            logger.info("connected to the scheduler at %s", self._address)
            self._is_announced, self._last_complaint = True, ""
        now_s = _now_s()
        for run in message.runs:
            generation = self._generations.get(run.request_id)
            if generation is None:
                # Aborted here; or the scheduler computes what nobody here waits for.
                if not run.finish_reason and run.request_id not in self._aborted_ids:
                    self._abort_unheld(run.request_id)
                continue
            was_started = generation.has_started
            if not generation.accept(run, now_s) and self._link is not None:
                logger.warning("tokens of %s are missing: asking for them again", run.request_id)
                self._link.send(generation.submit_message(now_s))
            if not was_started and generation.has_started:
                self._refusals_s.pop(generation.tenant, None)
                if run.error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED:
                    self._note_refusal(generation.tenant, now_s)
            self._drop_if_over(generation)

    def _note_refusal(self, tenant: str, now_s: float) -> None:
        """Note that the queue is full for a tenant, and forget what is past."""
        self._refusals_s.pop(tenant, None)  # the latest is the last one
        self._refusals_s[tenant] = now_s
        while now_s - self._refusals_s[oldest := next(iter(self._refusals_s))] >= REFUSAL_HOLDS_S:
            del self._refusals_s[oldest]

    def _abort_unheld(self, request_id: str) -> None:
        """Have the scheduler end a request that is not, or no longer, one of this gateway's."""
        # While the scheduler is away this needs no message: the next Hello does not name the request.
        if self._link is None:
            return
        self._link.send(_abort_message(request_id))
        self._aborted_ids[request_id] = None
        if len(self._aborted_ids) > _NUM_KEPT_ABORTS:
            del self._aborted_ids[next(iter(self._aborted_ids))]

    def _drop_if_over(self, generation: Generation) -> None:
        if generation.is_over:
            self._generations.pop(generation.request_id, None)

    def _lose_scheduler(self, was_heard: bool) -> None:
        now_s = _now_s()
        for generation in list(self._generations.values()):
            if was_heard:
                generation.lose_session(now_s)
            generation.lose_scheduler(now_s)
            self._drop_if_over(generation)

    async def _refresh_cell(self, stub: "scheduler_pb2_grpc.SchedulerAsyncStub") -> None:
        request = scheduler_pb2.GetModelRequest()
        cell: scheduler_pb2.GetModelResponse = await stub.GetModel(
            request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
        )
        # A cell that has lost all its workers keeps the model that clients know.
        if cell.HasField("model"):
            self._cell = cell

    async def _keep_cell_fresh(self, stub: "scheduler_pb2_grpc.SchedulerAsyncStub") -> None:
        while True:
            try:
                await self._refresh_cell(stub)
            except grpc.aio.AioRpcError as error:
                # Whether the session is broken is for its stream to say.
                logger.debug("GetModel failed: %s", error.details())
            await asyncio.sleep(_MODEL_POLL_S if self.cell is None else _MODEL_REFRESH_S)

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            now_s = _now_s()
            for generation in list(self._generations.values()):
                deadline_s = generation.deadline_s
                if deadline_s is not None and now_s > deadline_s + _DEADLINE_GRACE_S:
                    error = common_pb2.Error(
                        code=common_pb2.ERROR_CODE_DEADLINE_EXCEEDED, message="The request's time is over."
                    )
                    generation.fail(error, now_s)
                    self.abort(generation)

    def _complain(self, reason: str) -> None:
        """Log why there is no session, once for each reason."""
        complaint = f"no session with the scheduler at {self._address}: {reason}"
        if complaint != self._last_complaint:
            logger.warning("%s; trying again", complaint)
            self._last_complaint = complaint


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _abort_message(request_id: str, index: int | None = None) -> scheduler_pb2.ClientMessage:
    return scheduler_pb2.ClientMessage(abort=scheduler_pb2.Abort(request_id=request_id, index=index))
