"""A client's request under way: its generations at the scheduler, and its choices.

A completion may have several prompts, each of them a generation of its own at the scheduler with n sequences. Choice
`prompt_idx * n + sequence index` is the sequence's; whoever answers the client sees choices alone.
"""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.admission import Admission
from gateway.choice import Choice, Delta, EndingRules
from gateway.detokenizer import Detokenizer
from gateway.errors import ApiError, InternalError, UnavailableError, from_wire
from gateway.generation import ABORT, ERROR, Generation, Inbox, NewTokens
from gateway.metrics import RequestMetrics
from gateway.schemas import GenerateRequest
from gateway.session import SchedulerSession
from gateway.tokenizer import ModelTokenizer
from protos import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole answer."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None  # None: the scheduler could not tell


def new_reply_id(prefix: str) -> str:
    """Return an id as OpenAI's look: `chatcmpl-` or `cmpl-` and random digits."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Reply:
    """The answer to one request while it is being made. `close` must be called, however it ends."""

    def __init__(
        self,
        session: SchedulerSession,
        tokenizer: ModelTokenizer,
        metrics: RequestMetrics,
        admission: Admission,
        request: GenerateRequest,
    ) -> None:
        self.request = request
        self.choices: list[Choice] = []
        self._session = session
        self._metrics = metrics
        self._admission = admission
        self._inbox = Inbox()
        self._first_choice_idx: dict[Generation, int] = {}
        self._num_prompt_tokens = 0
        self._error: ApiError | None = None
        self._start_s = asyncio.get_running_loop().time()
        self._tokenizer = tokenizer
        self._silent_ids = tokenizer.silent_ids(request.skip_special_tokens)
        self._rules = EndingRules(
            request.stop, frozenset(request.stop_token_ids), request.min_tokens, request.include_stop_str_in_output
        )

    def submit(self, submits: Sequence[scheduler_pb2.Submit], timeout_s: float | None) -> None:
        """Send the request's prompts to the scheduler."""
        deadline_s = None if timeout_s is None else self._start_s + timeout_s
        for submit in submits:
            generation = self._session.submit(submit, self._inbox, deadline_s)
            self._first_choice_idx[generation] = len(self.choices)
            self._num_prompt_tokens += len(submit.token_ids)
            continued_ids = submit.token_ids if self.request.continues_prompt else ()
            for _ in range(submit.n):
                detokenizer = Detokenizer(self._tokenizer.decode, self._silent_ids, continued_ids)
                self.choices.append(Choice(len(self.choices), detokenizer, self._rules))
        self._metrics.submitted(self._num_prompt_tokens)
        self._admission.open()

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its last delta."""
        return all(choice.is_finished for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """The token counts so far; complete once `wait_for_usage` has returned."""
        num_output_tokens = sum(choice.num_tokens for choice in self.choices)
        told = [generation.num_cached_tokens for generation in self._first_choice_idx]
        known = [num_tokens for num_tokens in told if num_tokens is not None]
        return Usage(self._num_prompt_tokens, num_output_tokens, sum(known) if len(known) == len(told) else None)

    async def next(self) -> list[Delta]:
        """Wait for a step; return what it added to the choices. Raises ApiError once a choice has failed."""
        if self._error is not None:
            raise self._error
        deltas = self._deltas(await self._inbox.take())
        if self._error is not None and not deltas:
            raise self._error
        return deltas

    async def wait_for_usage(self) -> Usage:
        """Return the token counts of the finished answer: the scheduler states them when a sequence ends there."""
        while not all(generation.is_over for generation in self._first_choice_idx):
            self._deltas(await self._inbox.take())
        self._deltas(self._inbox.take_now())
        return self.usage

    def close(self) -> None:
        """Abort what has not ended, and count the end."""
        for generation in self._first_choice_idx:
            self._session.abort(generation)
        num_unfinished = sum(not choice.is_finished for choice in self.choices)
        seconds = asyncio.get_running_loop().time() - self._start_s
        self._metrics.end(seconds, num_unfinished, failed=self._error is not None)
        self._admission.close()

    def _deltas(self, items: Sequence[NewTokens]) -> list[Delta]:
        deltas = []
        for new in items:
            choice = self.choices[self._first_choice_idx[new.generation] + new.index]
            if choice.is_finished or self._error is not None:
                continue
            if new.finish_reason in (ERROR, ABORT):
                self._error = _error_of(new)
                continue
            self._metrics.tokens(choice.last_token_s, self._start_s, new.received_s, len(new.token_ids))
            choice.last_token_s = new.received_s
            delta = choice.push(new)
            if choice.is_finished:
                self._metrics.finish(str(delta.finish_reason))
                if not new.finish_reason:
                    self._session.end_sequence(new.generation, new.index)
            deltas.append(delta)
        return deltas


def _error_of(new: NewTokens) -> ApiError:
    if new.error is not None and new.finish_reason == ERROR:
        return from_wire(new.error)
    if new.finish_reason == ABORT:
        return UnavailableError("The server ended this request before it was complete.")
    return InternalError("The request failed.")
