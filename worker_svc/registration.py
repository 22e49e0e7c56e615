"""Keeps the worker registered: Register until the scheduler answers, heartbeats after that, and all over again when the
scheduler is gone or does not know this worker any more.

Every Register has a lane epoch of its own. Until the scheduler has adopted it the worker holds no rows: without a
scheduler nobody decodes. Sealed blocks stay, and the next scheduler finds them in the manifest.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from protos.channel import CHANNEL_OPTIONS, Refusals
from protos.credentials import Credentials
from protos.scheduler_pb2 import HeartbeatRequest, RegisterRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from worker_svc.fence import StepFence

if TYPE_CHECKING:
    from protos.scheduler_pb2_grpc import SchedulerAsyncStub  # exists for type checkers alone

logger = logging.getLogger(__name__)

RETRY_S = 1.0
CALL_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.1
# A scheduler that answers no heartbeat for this long is gone.
SILENCE_S = 3.0
# A scheduler that is ending may accept a connection that it never serves; gRPC would wait 20 s for it by default.
# A pool of its own keeps gRPC from handing out a connection that failed before, with its backoff.
_CHANNEL_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


class Registration:
    """One worker's standing with the scheduler. `offer` is what it registers with; its lane_epoch is filled in here."""

    def __init__(
        self, scheduler: str, credentials: Credentials, offer: RegisterRequest, fence: StepFence, refusals: Refusals
    ) -> None:
        self._scheduler = scheduler
        self._credentials = credentials
        self._metadata = credentials.metadata
        self._offer = offer
        self._fence = fence
        self._refusals = refusals
        self._last_complaint = ""

    async def run(self) -> None:
        """Register and stay registered until cancelled."""
        while True:
            # A new channel each time: it goes by the certificates of the moment.
            async with self._credentials.dial(self._scheduler, _CHANNEL_OPTIONS) as channel:
                stub: SchedulerAsyncStub = SchedulerStub(channel)
                interval_s = await self._register(stub)
                if interval_s is not None:
                    reason = await self._beat(stub, interval_s)
                    logger.warning("registering again: %s", reason)
                    continue
            await asyncio.sleep(RETRY_S)

    async def drain(self, patience_s: float) -> None:
        """Get no new sequences any more, and wait until those that run here have ended; `run` must have been cancelled.

        Returns at once where the scheduler is gone or does not know this worker; what runs here after `patience_s` goes
        on elsewhere.
        """
        request = HeartbeatRequest(
            instance_id=self._offer.instance_id, lane_epoch=self._offer.lane_epoch, draining=True
        )
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError):
            async with (
                asyncio.timeout(patience_s),
                self._credentials.dial(self._scheduler, _CHANNEL_OPTIONS) as channel,
            ):
                stub: SchedulerAsyncStub = SchedulerStub(channel)
                while True:
                    answer = await stub.Heartbeat(request, timeout=SILENCE_S, metadata=self._metadata)
                    if answer.drained or not answer.known:
                        return
                    await asyncio.sleep(DRAIN_POLL_S)

    async def _register(self, stub: "SchedulerAsyncStub") -> float | None:
        """Return seconds between heartbeats, or None when the scheduler did not take this worker."""
        self._offer.lane_epoch = await self._fence.begin_epoch()
        try:
            answer = await stub.Register(self._offer, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            self._complain(error)
            return None
        self._last_complaint = ""
        logger.info("registered with the scheduler at %s, lane epoch %d", self._scheduler, self._offer.lane_epoch)
        return answer.heartbeat_interval_ms / 1000 or RETRY_S

    async def _beat(self, stub: "SchedulerAsyncStub", interval_s: float) -> str:
        """Send heartbeats until the scheduler is gone or does not know this worker; return which."""
        loop = asyncio.get_running_loop()
        last_answer_s = loop.time()
        request = HeartbeatRequest(instance_id=self._offer.instance_id, lane_epoch=self._offer.lane_epoch)
        while True:
            await asyncio.sleep(interval_s)
            request.num_refused_calls_total.update(self._refusals.totals)
            try:
                answer = await stub.Heartbeat(request, timeout=SILENCE_S, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if loop.time() - last_answer_s > SILENCE_S:
                    return f"the scheduler at {self._scheduler} answers no heartbeat ({error.code().name})"
                continue
            if not answer.known:
                return "the scheduler does not know this worker"
            last_answer_s = loop.time()

    def _complain(self, error: grpc.aio.AioRpcError) -> None:
        """Log why registering failed: once, not at every try."""
        code, details = error.code(), self._credentials.explain(error.details())
        if code.name == self._last_complaint:
            return
        self._last_complaint = code.name
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            logger.warning(
                "the scheduler at %s does not answer, trying again every second: %s", self._scheduler, details
            )
        else:
            logger.error("the scheduler at %s refuses this worker (%s): %s", self._scheduler, code.name, details)
