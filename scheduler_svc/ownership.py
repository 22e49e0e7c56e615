"""Which gateway gets a request's tokens.

A request belongs to the gateway that submitted it and outlives that gateway's session by a moment:

    attached ──session breaks──▶ detached ──submitted again──▶ attached: the core replays from what was delivered
                                    └──detached_ms without a submit of its gateway──▶ aborted

Runs of a detached request are dropped, because the replay will carry their tokens. A request that ends while it is
detached is forgotten; submitted again it is computed from what was delivered on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import scheduler_pb2
from scheduler_svc.core.types import FinishReason, RequestId, SchedulerError, TokenRun, Usage
from scheduler_svc.outbox import Outbox


@dataclass(slots=True, eq=False)
class Gateway:
    """A gateway process, for as long as it has a session or requests."""

    gateway_id: str
    outbox: Outbox | None = None  # that of its session; None between two sessions
    requests: set[RequestId] = field(default_factory=set)
    last_submit_ms: int = 0  # when its newest submit came, in any of its sessions


@dataclass(slots=True, eq=False)
class Owned:
    """A request that has not ended, and who gets its runs."""

    gateway: Gateway
    submit: scheduler_pb2.Submit  # the newest
    unfinished: set[int]  # sequence indexes that still get a terminal run
    submitted_ms: int
    was_let_in_before: bool  # by a scheduler before this one
    detached_since_ms: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether runs carry logprobs."""
        return self.submit.sampling.HasField("num_logprobs")

    def ends(self, reason: FinishReason, error: SchedulerError | None = None) -> list[TokenRun]:
        """Return the terminal runs of a request that the core does not have."""
        num_delivered = {delivered.index: len(delivered.token_ids) for delivered in self.submit.delivered}
        return [
            TokenRun(
                RequestId(self.submit.request_id),
                sequence_idx,
                first_token_idx=num_delivered.get(sequence_idx, 0),
                finish_reason=reason,
                error=error,
                usage=Usage(len(self.submit.token_ids), 0, num_delivered.get(sequence_idx, 0)),
            )
            for sequence_idx in sorted(self.unfinished)
        ]


class Ownership:
    """All requests that have not ended, by id."""

    def __init__(self) -> None:
        self._owned: dict[RequestId, Owned] = {}
        self._detached: dict[RequestId, Owned] = {}

    def __len__(self) -> int:
        return len(self._owned)

    def get(self, request_id: RequestId) -> Owned | None:
        """Return a request that has not ended."""
        return self._owned.get(request_id)

    def request_ids(self) -> list[RequestId]:
        """Return the ids of all requests."""
        return list(self._owned)

    def detached(self) -> list[tuple[RequestId, Owned]]:
        """Return the requests whose gateway has to submit them again."""
        return list(self._detached.items())

    def attach(self, request_id: RequestId, owned: Owned) -> None:
        """Take a request in, new or again: its runs go to its gateway from now on."""
        self._owned[request_id] = owned
        self._detached.pop(request_id, None)
        owned.gateway.requests.add(request_id)

    def detach(self, gateway: Gateway, now_ms: int) -> None:
        """Drop the runs of all of a gateway's requests until each is submitted again."""
        for request_id in gateway.requests:
            owned = self._detached[request_id] = self._owned[request_id]
            owned.detached_since_ms = now_ms

    def forget(self, request_id: RequestId) -> None:
        """Drop all that may still come of a request."""
        owned = self._owned.pop(request_id)
        self._detached.pop(request_id, None)
        owned.gateway.requests.discard(request_id)

    def route(self, runs: Sequence[TokenRun]) -> None:
        """Put runs into their gateways' outboxes; a request is forgotten with its last terminal run."""
        for run in runs:
            owned = self._owned.get(run.request_id)
            if owned is None or run.sequence_idx not in owned.unfinished:
                continue
            outbox = owned.gateway.outbox
            if outbox is not None and run.request_id not in self._detached:
                outbox.put(run, run.logprobs if owned.wants_logprobs else ())
            if run.finish_reason is not None:
                owned.unfinished.remove(run.sequence_idx)
                if not owned.unfinished:
                    self.forget(run.request_id)
