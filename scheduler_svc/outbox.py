"""What one gateway has not been sent yet.

The step loop puts runs in and never waits. While the gateway's stream is busy, runs of the same sequence grow together,
so an outbox holds at most one run for each sequence, of at most max_tokens tokens.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import common_pb2, scheduler_pb2
from scheduler_svc import convert
from scheduler_svc.core.types import SchedulerError, TokenRun, Usage

# A message stays far below protos.channel.MAX_MESSAGE_BYTES, with twenty alternatives for each token too.
_MAX_TOKENS_PER_MESSAGE = 65_536


@dataclass(slots=True)
class _PendingRun:
    """A run that may still grow; its first token stands at `first_token_idx` of the output."""

    first_token_idx: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    finish_reason: "common_pb2.FinishReason.ValueType" = common_pb2.FINISH_REASON_UNSPECIFIED
    error: SchedulerError | None = None
    usage: Usage | None = None

    def add(self, run: TokenRun, logprobs: Sequence[object]) -> None:
        """Append a run that follows, or let a replay take the place of what it repeats."""
        num_kept = run.first_token_idx - self.first_token_idx
        if not 0 <= num_kept <= len(self.token_ids):
            # A replay from before the pending tokens runs to the newest one; nothing else can be out of line.
            self.first_token_idx, num_kept = run.first_token_idx, 0
        self.token_ids[num_kept:] = run.token_ids
        self.logprobs[num_kept:] = logprobs
        if run.finish_reason is not None:
            self.finish_reason = convert.FINISH_REASON_TO_WIRE[run.finish_reason]
            self.error = run.error
        if run.usage is not None:
            self.usage = run.usage


class Outbox:
    """Runs on their way to one session, at most one for each (request, index)."""

    def __init__(self) -> None:
        self._pending: dict[tuple[str, int], _PendingRun] = {}
        self._has_work = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether everything has been taken."""
        return not self._pending

    def put(self, run: TokenRun, logprobs: Sequence[object]) -> None:
        """Add a run, with the logprobs of its tokens where the request asked for them."""
        key = (run.request_id, run.sequence_idx)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _PendingRun(run.first_token_idx)
        pending.add(run, logprobs)
        self._has_work.set()

    def nudge(self) -> None:
        """Let `wait` return though there may be no run: a sign of life is due."""
        self._has_work.set()

    async def wait(self) -> None:
        """Return when there are runs, or a sign of life is due."""
        await self._has_work.wait()

    def take(self) -> scheduler_pb2.ServerMessage:
        """Remove what is pending, up to the size of a message, and return it; without runs it is a sign of life."""
        message = scheduler_pb2.ServerMessage()
        num_tokens = 0
        for request_id, index in list(self._pending):
            if num_tokens >= _MAX_TOKENS_PER_MESSAGE:
                break
            pending = self._pending.pop((request_id, index))
            num_tokens += len(pending.token_ids)
            wire = message.runs.add(
                request_id=request_id,
                index=index,
                first_token_idx=pending.first_token_idx,
                token_ids=pending.token_ids,
                finish_reason=pending.finish_reason,
            )
            if pending.logprobs:
                wire.logprobs.extend([convert.logprobs_to_wire(logprobs) for logprobs in pending.logprobs])
            if pending.error is not None:
                wire.error.CopyFrom(convert.error_to_wire(pending.error))
            if pending.usage is not None:
                wire.usage.CopyFrom(convert.usage_to_wire(pending.usage))
        if not self._pending:
            self._has_work.clear()
        return message
