"""One request at the scheduler, as the gateway keeps it: what was delivered, so that nothing is lost or doubled.

The scheduler sends each sequence's tokens in runs. A run names the place of its first token, so after a break in the
session or a repeat what is known is dropped, and missing tokens show as a gap. What is new goes to the inbox of the
client's request, which may have several generations (one for each prompt).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import common_pb2, scheduler_pb2

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
ABORT = common_pb2.FINISH_REASON_ABORT
ERROR = common_pb2.FINISH_REASON_ERROR
_NOT_FINISHED = common_pb2.FINISH_REASON_UNSPECIFIED


MAX_LOSSES = 3  # a request at stake so often without a new token is taken for the cause


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What a step gave to one sequence, or how it ended."""

    generation: "Generation"
    index: int  # of the sequence in its generation
    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprobs]  # parallel to token_ids, or empty
    received_s: float  # the loop's clock
    finish_reason: int = _NOT_FINISHED
    error: common_pb2.Error | None = None  # with ERROR


class Inbox:
    """Hands what the session receives to the one task that answers the client."""

    def __init__(self) -> None:
        self._items: list[NewTokens] = []
        self._has_items = asyncio.Event()

    def put(self, item: NewTokens) -> None:
        """Add an item; never waits."""
        self._items.append(item)
        self._has_items.set()

    async def take(self) -> list[NewTokens]:
        """Wait for items; return all that there are."""
        await self._has_items.wait()
        return self.take_now()

    def take_now(self) -> list[NewTokens]:
        """Return the items that there are, without waiting."""
        self._has_items.clear()
        items, self._items = self._items, []
        return items


@dataclass(slots=True)
class _SequenceState:
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: int = _NOT_FINISHED
    ended_here: bool = False  # by the gateway; the scheduler's terminal run is still to come
    in_gap: bool = False  # a resubmit is on its way: runs that do not fit are no news


class Generation:
    """A submitted request and the state of its sequences."""

    def __init__(self, submit: scheduler_pb2.Submit, inbox: Inbox, deadline_s: float | None) -> None:
        """Take the request as it was first submitted, and the time on the loop's clock when it ends, if it does."""
        self.request_id: str = submit.request_id
        self.tenant: str = submit.tenant
        self.deadline_s = deadline_s
        self.has_started = False  # a sequence has had a token, or has ended
        # Prompt tokens that the first attempt found cached: a repetition finds what the attempts before it computed.
        self.num_cached_tokens: int | None = None  # None: the scheduler has not told
        self._is_at_stake = False  # in this session the scheduler told that a worker computes it
        self._num_losses = 0  # sessions that broke in a row while it was at stake, without a new token between
        self._was_submitted = False
        self._submit = submit
        self._inbox = inbox
        self._sequences = [_SequenceState() for _ in range(submit.n)]
        self._num_open = int(submit.n)

    @property
    def is_over(self) -> bool:
        """Whether every sequence has had its terminal event."""
        return self._num_open == 0

    def accept(self, run: scheduler_pb2.TokenRun, now_s: float) -> bool:
        """Take what is new in a run; return False when tokens before it are missing and must be asked for."""
        if run.index >= len(self._sequences):
            return True
        if run.HasField("usage"):
            self._is_at_stake = True
            if self.num_cached_tokens is None:
                self.num_cached_tokens = run.usage.num_cached_tokens
        state = self._sequences[run.index]
        if state.finish_reason:
            return True
        if state.ended_here:
            if run.finish_reason:
                self._finish(run.index, run.finish_reason, now_s)
            return True
        num_known = len(state.token_ids) - run.first_token_idx
        if num_known < 0:
            was_in_gap, state.in_gap = state.in_gap, True
            return was_in_gap
        state.in_gap = False
        self._deliver(state, run, num_known, now_s)
        return True

    def end_sequence(self, index: int) -> bool:
        """Take no more tokens of a sequence; return whether the scheduler must be told."""
        state = self._sequences[index]
        state.ended_here = True
        return not state.finish_reason

    def lose_session(self, now_s: float) -> None:
        """Note that a session in which the scheduler was heard is over: it has let the request in, or was about to.

        A request that was being computed at MAX_LOSSES such breaks in a row, without a new token between, ends with an
        error: it may be what takes the scheduler down. One that waits in the queue may do so over any number of them.
        """
        self._was_submitted = True
        self._num_losses += self._is_at_stake
        self._is_at_stake = False
        if self._num_losses >= MAX_LOSSES:
            message = f"The request was being computed at {self._num_losses} failures of the scheduler in a row."
            self.fail(common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message=message), now_s)

    def lose_scheduler(self, now_s: float) -> None:
        """Give sequences that ended here their terminal event: the scheduler that owed it is gone."""
        for index, state in enumerate(self._sequences):
            if state.ended_here and not state.finish_reason:
                self._finish(index, ABORT, now_s)

    def fail(self, error: common_pb2.Error, now_s: float) -> None:
        """End every sequence that is still open with an error."""
        for index, state in enumerate(self._sequences):
            if not state.finish_reason:
                self._finish(index, ERROR, now_s, error=error)

    def submit_message(self, now_s: float) -> scheduler_pb2.ClientMessage:
        """Return the message that submits the request, or attaches to it again from what was delivered."""
        message = scheduler_pb2.ClientMessage(submit=self._submit)
        submit = message.submit
        submit.is_resubmit = self._was_submitted
        if self.deadline_s is not None:
            submit.remaining_deadline_ms = max(0, int(1000 * (self.deadline_s - now_s)))
        for index, state in enumerate(self._sequences):
            finish_reason = STOP if state.ended_here and not state.finish_reason else state.finish_reason
            if state.token_ids or finish_reason:
                submit.delivered.add(
                    index=index,
                    token_ids=state.token_ids,
                    finish_reason=finish_reason,
                    cumulative_logprob=state.cumulative_logprob,
                )
        return message

    def _deliver(self, state: _SequenceState, run: scheduler_pb2.TokenRun, num_known: int, now_s: float) -> None:
        token_ids = run.token_ids[num_known:]
        if not token_ids and not run.finish_reason:
            return
        if token_ids:
            self._is_at_stake, self._num_losses = True, 0
        logprobs = run.logprobs[num_known:]
        state.token_ids += token_ids
        state.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        self.has_started = True
        if run.finish_reason:
            error = run.error if run.finish_reason == ERROR else None
            self._finish(run.index, run.finish_reason, now_s, token_ids, logprobs, error)
        else:
            self._inbox.put(NewTokens(self, run.index, token_ids, logprobs, now_s))

    def _finish(
        self,
        index: int,
        finish_reason: int,
        now_s: float,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[common_pb2.TokenLogprobs] = (),
        error: common_pb2.Error | None = None,
    ) -> None:
        self._sequences[index].finish_reason = finish_reason
        self._num_open -= 1
        self.has_started = True
        self._inbox.put(NewTokens(self, index, token_ids, logprobs, now_s, finish_reason, error))
