"""Gateways' sessions: what a gateway may say, what is done about it, and when its silence ends the session."""

import logging
from collections.abc import Callable

from protos import scheduler_pb2
from scheduler_svc import convert
from scheduler_svc.cell import Cell
from scheduler_svc.core.types import ErrorCode, FinishReason, RequestId, SchedulerError
from scheduler_svc.errors import ServiceError, SessionBrokenError, SessionRefusedError, StaleSessionError
from scheduler_svc.outbox import Outbox
from scheduler_svc.ownership import Gateway, Owned, Ownership
from scheduler_svc.timing import Clock, Timing

logger = logging.getLogger(__name__)

_NUM_KEPT_NUMBERS = 4096


class GatewaySession:
    """One stream of one gateway. Its owner moves messages; `end` tells it, once at most, to stop and why."""

    def __init__(self, gateway: Gateway, now_ms: int, end: Callable[[ServiceError], None]) -> None:
        self.gateway = gateway
        self.outbox = Outbox()
        self.end = end
        self.last_heard_ms = self.last_sent_ms = now_ms
        self.sending_since_ms: int | None = None  # a message is on its way into the stream


class SessionHub:
    """All gateways of a cell. Synchronous: the service moves the messages and calls `judge` again and again."""

    def __init__(self, cell: Cell, ownership: Ownership, timing: Timing, clock: Clock) -> None:
        self.is_draining = False
        self._cell = cell
        self._ownership = ownership
        self._timing = timing
        self._clock = clock
        self._gateways: dict[str, Gateway] = {}
        self._sessions: dict[str, GatewaySession] = {}  # by gateway id
        # Session numbers by gateway id, of gateways that are gone too, so that no old Hello is taken; the latest last.
        self._newest_numbers: dict[str, int] = {}
        # Requests wait here until a worker has told the model: without it no block hash can be made.
        self._held: dict[RequestId, Owned] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no request is left and every session has been sent all that it gets."""
        sessions = self._sessions.values()
        return not self._ownership and all(s.outbox.is_empty and s.sending_since_ms is None for s in sessions)

    @property
    def num_sessions(self) -> int:
        """Gateways that are connected."""
        return len(self._sessions)

    @property
    def num_held_seqs(self) -> int:
        """Sequences that wait for the cell's first worker."""
        return sum(len(owned.unfinished) for owned in self._held.values())

    # ---- a session's life

    def open(self, hello: scheduler_pb2.Hello, end: Callable[[ServiceError], None]) -> GatewaySession:
        """Begin a gateway's session: it supersedes an older one, and requests that it does not list are aborted.

        Raises StaleSessionError unless the session is the gateway's newest.
        """
        self._take_number(hello)
        gateway = self._gateways.get(hello.gateway_id)
        if gateway is None:
            gateway = self._gateways[hello.gateway_id] = Gateway(hello.gateway_id)
        older = self._sessions.get(gateway.gateway_id)
        if older is not None:
            self._break(older, "a newer session has taken its place")
        session = GatewaySession(gateway, self._clock(), end)
        # Breaking the older session forgets a gateway without requests.
        self._gateways[gateway.gateway_id] = gateway
        self._sessions[gateway.gateway_id] = session
        gateway.outbox = session.outbox
        for request_id in gateway.requests.difference(hello.request_ids):
            self._ownership.forget(request_id)
            self._end(request_id)
        self._ownership.detach(gateway, self._clock())
        logger.info("gateway %s opened session %d", gateway.gateway_id, hello.session_number)
        return session

    def close(self, session: GatewaySession) -> None:
        """Note that a session's stream has ended; its requests wait for a new one."""
        gateway = session.gateway
        if self._sessions.get(gateway.gateway_id) is not session:
            return
        del self._sessions[gateway.gateway_id]
        gateway.outbox = None
        self._ownership.detach(gateway, self._clock())
        if not gateway.requests:
            del self._gateways[gateway.gateway_id]

    def receive(self, session: GatewaySession, message: scheduler_pb2.ClientMessage) -> None:
        """Act on a gateway's message; one that still comes of a session that has ended is ignored.

        Raises SessionRefusedError for a second Hello.
        """
        if self._sessions.get(session.gateway.gateway_id) is not session:
            return
        session.last_heard_ms = self._clock()
        kind = message.WhichOneof("kind")
        if kind == "submit":
            session.gateway.last_submit_ms = session.last_heard_ms
            self._submit(session.gateway, message.submit)
        elif kind == "abort":
            self._abort(session.gateway, message.abort)
        elif kind == "hello":
            raise SessionRefusedError("a session has one Hello, at its begin")

    def end_all(self, error: ServiceError) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            session.end(error)
            self.close(session)

    # ---- timers

    def judge(self) -> None:
        """Look at all timers: break dead sessions, abort what nobody came back for, let signs of life be sent."""
        now_ms, timing = self._clock(), self._timing
        for session in list(self._sessions.values()):
            silent_ms = now_ms - session.last_heard_ms
            unread_ms = 0 if session.sending_since_ms is None else now_ms - session.sending_since_ms
            if silent_ms > timing.silence_ms:
                self._break(session, f"silent for {silent_ms} ms")
            elif unread_ms > timing.unread_ms:
                self._break(session, f"has not read for {unread_ms} ms")
            elif now_ms - session.last_sent_ms >= timing.sign_of_life_ms:
                session.outbox.nudge()
        for request_id, owned in self._ownership.detached():
            assert owned.detached_since_ms is not None
            # A gateway with many large prompts needs a while to submit them all again: each submit starts it anew.
            waiting_since_ms = max(owned.detached_since_ms, owned.gateway.last_submit_ms)
            if now_ms - waiting_since_ms > timing.detached_ms:
                logger.info("request %s is aborted: its gateway has not submitted it again", request_id)
                self._abandon(request_id, owned)
        for request_id, owned in list(self._held.items()):
            # What was let in before a restart waits as long as it would have without one: workers may be starting too.
            if not owned.was_let_in_before and now_ms - owned.submitted_ms > timing.awaiting_model_ms:
                self._end(request_id, SchedulerError(ErrorCode.UNAVAILABLE, "no worker has registered yet"))

    def restart_timers(self) -> None:
        """Begin all waiting anew: this process's own loop was late."""
        now_ms = self._clock()
        for session in self._sessions.values():
            session.last_heard_ms = now_ms
            if session.sending_since_ms is not None:
                session.sending_since_ms = now_ms
        for _, owned in self._ownership.detached():
            owned.detached_since_ms = now_ms

    # ---- requests

    def submit_held(self) -> None:
        """Submit what came before the cell knew its model."""
        held, self._held = self._held, {}
        for owned in held.values():
            self._to_core(owned)

    def end_requests(self, error: SchedulerError) -> None:
        """End everything that still runs with an error."""
        for request_id in self._ownership.request_ids():
            self._end(request_id, error)

    def _submit(self, gateway: Gateway, submit: scheduler_pb2.Submit) -> None:
        request_id = RequestId(submit.request_id)
        delivered_ends = {delivered.index for delivered in submit.delivered if delivered.finish_reason}
        known = self._ownership.get(request_id)
        owned = Owned(
            gateway,
            submit,
            set(range(submit.n)) - delivered_ends,
            self._clock(),
            submit.is_resubmit if known is None else known.was_let_in_before,
        )
        if known is not None and known.gateway is not gateway:
            self._refuse(owned, ErrorCode.INVALID_ARGUMENT, "another gateway has a request of this id", "request_id")
            return
        # What was let in before stays in, though a scheduler that has just started cannot know it.
        is_new = known is None and not submit.is_resubmit
        if self.is_draining and is_new:
            self._refuse(owned, ErrorCode.UNAVAILABLE, "the server is shutting down")
            return
        if is_new and submit.n > (bound := self._cell.settings.max_queued_requests):
            # Not the queue's "try again later": there will never be room.
            message = f"n is {submit.n}, but at most {bound} sequences may wait for a worker"
            self._refuse(owned, ErrorCode.INVALID_ARGUMENT, message, "n")
            return
        if not owned.unfinished:
            if known is not None:
                self._ownership.forget(request_id)
                self._end(request_id)
            return
        self._ownership.attach(request_id, owned)
        if self._cell.model is None:
            self._hold(request_id, owned)
            return
        self._to_core(owned)
        if known is not None:
            for sequence_idx in delivered_ends & known.unfinished:
                self._cell.abort(request_id, sequence_idx)  # the gateway ended it while the session was broken

    def _hold(self, request_id: RequestId, owned: Owned) -> None:
        is_new = not owned.submit.is_resubmit and request_id not in self._held
        if is_new and self._holds_too_many(owned.submit):
            error = SchedulerError(ErrorCode.RESOURCE_EXHAUSTED, "too many requests wait for a worker: try again later")
            self._ownership.route(owned.ends(FinishReason.ERROR, error))
            return
        self._held[request_id] = owned

    def _take_number(self, hello: scheduler_pb2.Hello) -> None:
        newest = self._newest_numbers.get(hello.gateway_id)
        if newest is not None and hello.session_number <= newest:
            raise StaleSessionError(f"session_number must grow: the gateway sent {hello.session_number} after {newest}")
        self._newest_numbers.pop(hello.gateway_id, None)
        self._newest_numbers[hello.gateway_id] = hello.session_number
        if len(self._newest_numbers) > _NUM_KEPT_NUMBERS:
            del self._newest_numbers[next(iter(self._newest_numbers))]

    def _salt(self, tenant: str) -> bytes:
        settings = self._cell.settings
        if settings.share_prefixes:
            return convert.shared_salt(settings.cluster_token)
        return convert.tenant_salt(settings.cluster_token, tenant)

    def _holds_too_many(self, submit: scheduler_pb2.Submit) -> bool:
        """Return whether one more request is too many, by the bounds of the queue that it will go to."""
        most, tenant = self._cell.settings.max_queued_requests, submit.tenant
        num_own = sum(len(owned.unfinished) for owned in self._held.values() if owned.submit.tenant == tenant)
        return num_own + submit.n > most or self.num_held_seqs + submit.n > 2 * most

    def _to_core(self, owned: Owned) -> None:
        model, salt = self._cell.model, self._salt(owned.submit.tenant)
        assert model is not None, "held until there is one"
        try:
            self._cell.submit(convert.request_from_wire(owned.submit, model, salt, self._clock()))
        except SchedulerError as error:
            self._ownership.route(owned.ends(FinishReason.ERROR, error))

    def _refuse(self, owned: Owned, code: ErrorCode, message: str, param: str | None = None) -> None:
        """Answer a submit with terminal runs; nothing is kept of it."""
        assert owned.gateway.outbox is not None
        for run in owned.ends(FinishReason.ERROR, SchedulerError(code, message, param)):
            owned.gateway.outbox.put(run, ())

    def _abort(self, gateway: Gateway, abort: scheduler_pb2.Abort) -> None:
        request_id = RequestId(abort.request_id)
        owned = self._ownership.get(request_id)
        if owned is None or owned.gateway is not gateway:
            return
        sequence_idx = abort.index if abort.HasField("index") else None
        if request_id not in self._held:
            self._cell.abort(request_id, sequence_idx)
            return
        runs = [run for run in owned.ends(FinishReason.ABORT) if sequence_idx in (None, run.sequence_idx)]
        self._ownership.route(runs)
        if not owned.unfinished:
            del self._held[request_id]

    def _abandon(self, request_id: RequestId, owned: Owned) -> None:
        """Abort a request that its gateway has not submitted again. A gateway that is there is told so."""
        self._ownership.attach(request_id, owned)
        self._end(request_id)
        gateway = owned.gateway
        if gateway.outbox is None and not gateway.requests:
            del self._gateways[gateway.gateway_id]

    def _end(self, request_id: RequestId, error: SchedulerError | None = None) -> None:
        """End a request, held or not: aborted, or with an error. Its owner, if it has one, gets the terminal runs."""
        held = self._held.pop(request_id, None)
        if held is None:
            self._cell.abort(request_id, error=error)
        else:
            self._ownership.route(held.ends(FinishReason.ERROR if error else FinishReason.ABORT, error))

    def _break(self, session: GatewaySession, reason: str) -> None:
        logger.warning("gateway %s: its session is broken: %s", session.gateway.gateway_id, reason)
        session.end(SessionBrokenError(reason))
        self.close(session)
