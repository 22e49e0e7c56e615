"""Which workers belong to the cell: registration, the dial back, heartbeats, and when a lane is given up.

Register ──▶ fits the cell? ──▶ Health at its address says the same? ──▶ answered
                                                                then: fence and manifest ──▶ live ──▶ steps
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import grpc.aio

from protos import common_pb2, scheduler_pb2
from protos.channel import PROTOCOL_VERSION, Refusal, Refusals
from protos.credentials import Credentials
from scheduler_svc import convert
from scheduler_svc.cell import Cell
from scheduler_svc.core.arena import MAX_SLABS, PLACES_PER_SLAB
from scheduler_svc.core.mixed_kv import stays_native
from scheduler_svc.core.precision import NATIVE_DTYPES, PrecisionError
from scheduler_svc.core.types import Format, LaneId
from scheduler_svc.errors import RegistrationRefusedError, StaleRegistrationError, WorkerUnreachableError
from scheduler_svc.lane_driver import LaneDriver, LaneFencedError, LaneIdentity, LaneLostError, WorkerLink
from scheduler_svc.timing import Clock, Timing

logger = logging.getLogger(__name__)

# What all workers of a cell must agree on. The core counts in these, or cached blocks would not be what they are said
# to be.
_SHARED_MODEL_FIELDS = ("fingerprint", "block_size", "max_model_len", "vocab_size", "dtype", "kv_cache_dtype")
_REASONS = frozenset(reason.value for reason in Refusal)
_MOST_REFUSALS = 2**48  # of one worker: whatever it says, sums of these can be told


class AllLanesFencedError(Exception):
    """Another scheduler has taken this one's workers."""


@dataclass(slots=True, eq=False)
class Lane:
    """A registered worker; `task` runs its driver."""

    driver: LaneDriver
    max_num_seqs: int
    last_heartbeat_ms: int
    task: asyncio.Task[None] | None = None


class Registry:
    """The cell's workers. `on_model` is called when the first of them has told the cell's model."""

    def __init__(
        self,
        cell: Cell,
        timing: Timing,
        clock: Clock,
        credentials: Credentials,
        refusals: Refusals,
        on_model: Callable[[], None],
    ) -> None:
        # Of the largest lane that was ever here, by a request's floor: by these the core refuses prompts too.
        self.kv_capacity_tokens: dict[Format, int] = {}
        self._cell = cell
        self._timing = timing
        self._clock = clock
        self._credentials = credentials
        self._refusals = refusals
        self._on_model = on_model
        self._lanes: dict[LaneId, Lane] = {}
        self._newest_epochs: dict[LaneId, int] = {}  # that a Register came with
        self._confirmed_epochs: dict[LaneId, int] = {}  # that the worker at the address had too
        self._told_refusals: dict[LaneId, Mapping[str, int]] = {}  # what each worker process has told so far
        self._fenced_since_ms: dict[LaneId, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_complaint = ""

    @property
    def lanes(self) -> Collection[Lane]:
        """Registered workers, live or on the way to it."""
        return self._lanes.values()

    async def register(self, message: scheduler_pb2.RegisterRequest) -> None:
        """Take a worker in; its lane becomes live later. Raises ServiceError with the reason for a refusal."""
        try:
            await self._take_in(message)
        except RegistrationRefusedError as error:
            complaint = f"the worker at {message.address} does not fit this cell: {error}"
            # Once: it tries again and again.
            if error.refusal is Refusal.UNFIT_REGISTER and complaint != self._last_complaint:
                logger.warning("%s", complaint)
                self._last_complaint = complaint
            raise

    async def _take_in(self, message: scheduler_pb2.RegisterRequest) -> None:
        identity = LaneIdentity(LaneId(message.instance_id), message.address, message.lane_epoch)
        self._check(message, identity)
        # A worker that ended its lane's epoch to begin one here has not gone to another scheduler.
        self._fenced_since_ms.pop(identity.lane_id, None)
        # At once, so that an older Register that is still being dialed back loses.
        self._newest_epochs[identity.lane_id] = identity.lane_epoch
        link = WorkerLink(identity.address, self._credentials)
        try:
            await self._dial_back(link, identity)
            if self._newest_epochs.get(identity.lane_id) != identity.lane_epoch:
                raise StaleRegistrationError(f"lane_epoch {identity.lane_epoch}: a newer one has registered meanwhile")
            self._check_model(message.model)
        except BaseException:
            # An epoch that somebody made up must not keep out the worker whose name he took.
            if self._newest_epochs.get(identity.lane_id) == identity.lane_epoch:
                self._newest_epochs.pop(identity.lane_id)
                if identity.lane_id in self._confirmed_epochs:
                    self._newest_epochs[identity.lane_id] = self._confirmed_epochs[identity.lane_id]
            await link.close()
            raise
        self._admit(message, identity, link)

    def heartbeat(self, message: scheduler_pb2.HeartbeatRequest) -> scheduler_pb2.HeartbeatResponse:
        """Note that a worker lives; tell it whether it is known in this epoch, and, where it is leaving, may leave."""
        lane = self._lanes.get(LaneId(message.instance_id))
        if lane is None or lane.driver.identity.lane_epoch != message.lane_epoch:
            return scheduler_pb2.HeartbeatResponse(known=False)
        lane.last_heartbeat_ms = self._clock()
        self._count_refusals(lane.driver.identity.lane_id, message.num_refused_calls_total)
        drained = message.draining and (not lane.driver.is_live or self._cell.drain_lane(lane.driver.identity.lane_id))
        if drained:
            logger.info("lane %s at %s has left", lane.driver.identity.lane_id, lane.driver.identity.address)
            self._forget(lane)
        return scheduler_pb2.HeartbeatResponse(known=True, drained=drained)

    def judge(self) -> None:
        """Give up lanes that are silent or whose step is overdue; fail the cell when another scheduler has taken it."""
        now_ms = self._clock()
        for lane in list(self._lanes.values()):
            silent_ms = now_ms - max(lane.last_heartbeat_ms, lane.driver.last_result_ms)
            if silent_ms > self._timing.silence_ms:
                self._lose(lane, f"silent for {silent_ms} ms")
            elif (reason := lane.driver.overdue(now_ms)) is not None:
                self._lose(lane, reason)
        if self._lanes:
            # Of a worker that stays here longer than this, another scheduler has not taken all.
            self._forget_fences(before_ms=now_ms - self._timing.fenced_ms)
        elif self._fenced_since_ms and now_ms - max(self._fenced_since_ms.values()) > self._timing.fenced_ms:
            self._cell.fail(AllLanesFencedError("all workers obey another scheduler now"))

    def restart_timers(self) -> None:
        """Begin all waiting anew: this process's own loop was late."""
        now_ms = self._clock()
        for lane in self._lanes.values():
            lane.last_heartbeat_ms = now_ms
            lane.driver.restart_timers(now_ms)

    async def close(self) -> None:
        """End all lanes' streams; what the core holds stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self, message: scheduler_pb2.RegisterRequest, identity: LaneIdentity) -> None:
        """Raise RegistrationRefusedError for what can be told without asking the worker."""
        if message.protocol_version != PROTOCOL_VERSION:
            raise RegistrationRefusedError(
                f"protocol version: the worker has {message.protocol_version}, the scheduler {PROTOCOL_VERSION}"
            )
        for name in ("instance_id", "address"):
            if not getattr(message, name):
                raise RegistrationRefusedError(f"{name} is empty")
        _check_sizes(message)
        self._check_model(message.model)
        try:
            self._cell.core.max_seq_tokens(convert.lane_spec_from_wire(message))
        except PrecisionError as error:
            raise RegistrationRefusedError(str(error)) from None
        known = self._lanes.get(identity.lane_id)
        if known is not None and known.driver.identity.address != identity.address:
            raise RegistrationRefusedError(
                f"instance_id {identity.lane_id} is known at {known.driver.identity.address}, not at {identity.address}"
            )
        newest_epoch = self._newest_epochs.get(identity.lane_id)
        if newest_epoch is not None and identity.lane_epoch <= newest_epoch:
            raise StaleRegistrationError(
                f"lane_epoch must grow: the worker has {identity.lane_epoch}, the scheduler knows {newest_epoch}"
            )

    def _check_model(self, model: common_pb2.ModelInfo) -> None:
        """Raise RegistrationRefusedError unless the model is the one that the cell's first worker brought."""
        for name in ("block_size", "max_model_len", "vocab_size"):
            if getattr(model, name) == 0:
                raise RegistrationRefusedError(f"the model's {name} is 0")
        wanted = NATIVE_DTYPES.get(self._cell.settings.kv_cache_dtype)
        if wanted not in (None, model.kv_cache_dtype):
            raise RegistrationRefusedError(
                f"--kv-cache-dtype: the cell wants {wanted}, the worker's native KV is {model.kv_cache_dtype}"
            )
        if self._cell.model is None:
            return
        for name in _SHARED_MODEL_FIELDS:
            ours, theirs = getattr(self._cell.model, name), getattr(model, name)
            if ours != theirs:
                raise RegistrationRefusedError(f"{name}: the worker has {_shown(theirs)}, this cell {_shown(ours)}")

    async def _dial_back(self, link: WorkerLink, identity: LaneIdentity) -> None:
        """Raise unless the worker that registered is the one that answers at its address."""
        try:
            health = await link.health(self._timing.dial_ms)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnreachableError(
                f"the scheduler cannot reach the worker at {identity.address}: "
                + self._credentials.explain(error.details())
            ) from error
        if (health.instance_id, health.lane_epoch) != (identity.lane_id, identity.lane_epoch):
            raise RegistrationRefusedError(
                f"at {identity.address} answers instance_id {health.instance_id}, lane_epoch {health.lane_epoch}, "
                f"not {identity.lane_id}, {identity.lane_epoch}"
            )

    def _admit(self, message: scheduler_pb2.RegisterRequest, identity: LaneIdentity, link: WorkerLink) -> None:
        self._confirmed_epochs[identity.lane_id] = identity.lane_epoch
        previous = self._lanes.get(identity.lane_id)
        if previous is not None:
            self._lose(previous, "the worker registered again")
        spec = convert.lane_spec_from_wire(message)
        for floor, num_tokens in self._cell.core.max_seq_tokens(spec).items():
            self.kv_capacity_tokens[floor] = max(self.kv_capacity_tokens.get(floor, 0), num_tokens)
        if stays_native(spec, self._cell.settings.precision()):
            logger.warning(
                "lane %s: its KV arena of %d slabs is too small for several formats, all blocks stay native",
                identity.lane_id,
                spec.num_slabs,
            )
        if self._cell.model is None:
            self._cell.model = message.model
            self._on_model()
        lane = Lane(
            driver=LaneDriver(identity, spec, link, self._cell, self._timing, self._clock),
            max_num_seqs=self._cell.core.max_rows(spec),
            last_heartbeat_ms=self._clock(),
        )
        self._lanes[identity.lane_id] = lane
        self._fenced_since_ms.clear()  # this worker, if no other, obeys this scheduler
        lane.task = asyncio.create_task(self._drive(lane), name=f"lane {identity.lane_id}")
        self._tasks.add(lane.task)
        lane.task.add_done_callback(self._tasks.discard)

    async def _drive(self, lane: Lane) -> None:
        try:
            await lane.driver.run()
        except LaneLostError as error:
            # A lane that has been replaced says nothing: its worker ended the epoch to begin the next one here.
            if isinstance(error, LaneFencedError) and self._lanes.get(lane.driver.identity.lane_id) is lane:
                self._fenced_since_ms[lane.driver.identity.lane_id] = self._clock()
            self._lose(lane, str(error))
        except Exception as error:
            self._cell.fail(error)

    def _count_refusals(self, lane_id: LaneId, totals: Mapping[str, int]) -> None:
        told = self._told_refusals.get(lane_id, {})
        known = {reason: min(total, _MOST_REFUSALS) for reason, total in totals.items() if reason in _REASONS}
        self._refusals.add({reason: max(0, total - told.get(reason, 0)) for reason, total in known.items()})
        self._told_refusals[lane_id] = {**told, **known}

    def _forget_fences(self, before_ms: int) -> None:
        for lane_id, since_ms in list(self._fenced_since_ms.items()):
            if since_ms < before_ms:
                del self._fenced_since_ms[lane_id]

    def _lose(self, lane: Lane, reason: str) -> None:
        """Forget a worker; its sequences go back to the queue. Does nothing for one that is forgotten already."""
        identity = lane.driver.identity
        if self._lanes.get(identity.lane_id) is not lane:
            return
        logger.warning("lane %s at %s is lost: %s", identity.lane_id, identity.address, reason)
        self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        identity = lane.driver.identity
        del self._lanes[identity.lane_id]
        if lane.task is not None and lane.task is not asyncio.current_task():
            lane.task.cancel()
        if lane.driver.is_live:
            lane.driver.is_live = False
            self._cell.drop_lane(identity.lane_id)


def _check_sizes(message: scheduler_pb2.RegisterRequest) -> None:
    """Raise RegistrationRefusedError where a worker offers nothing, or more than can be named."""
    for name in ("num_slabs", "native_blocks_per_slab", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(message, name) == 0:
            raise RegistrationRefusedError(f"{name} is 0")
    if message.num_slabs > MAX_SLABS:
        raise RegistrationRefusedError(f"num_slabs is {message.num_slabs}, above {MAX_SLABS}, the most that have ids")
    if (num_blocks := max(message.native_blocks_per_slab, *message.blocks_per_slab, 0)) > PLACES_PER_SLAB:
        raise RegistrationRefusedError(
            f"a slab holds {num_blocks} blocks, above {PLACES_PER_SLAB}, the places that an entry can name"
        )


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)
