"""Who is let in: nobody while the gateway drains, and no more than the cell's queue holds, known before tokenizing."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import OverloadedError, UnavailableError
from gateway.session import SchedulerSession

# After the scheduler has refused a request, the next ones are refused here for this long, or until one has started.
_REFUSAL_HOLDS_S = 0.25


class Admission:
    """Counts requests from the moment they come in until they are answered."""

    def __init__(self, session: SchedulerSession) -> None:
        self._session = session
        self._num_preparing = 0
        self._num_open = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False

    @contextmanager
    def preparing(self, num_prompts: int) -> Iterator[None]:
        """Hold places for prompts that are about to be tokenized and submitted.

        Raises UnavailableError while draining and OverloadedError when the queue is full.
        """
        if self.is_draining:
            raise UnavailableError("The server is shutting down.")
        if self._is_full(num_prompts):
            raise OverloadedError("The server's queue is full: try again in a moment.")
        self._num_preparing += num_prompts
        self._note_idleness()
        try:
            yield
        finally:
            self._num_preparing -= num_prompts
            self._note_idleness()

    def open(self) -> None:
        """Count a request whose answer has begun."""
        self._num_open += 1
        self._note_idleness()

    def close(self) -> None:
        """Count the end of an answer."""
        self._num_open -= 1
        self._note_idleness()

    async def drain(self, patience_s: float) -> bool:
        """Let nobody in any more; return whether all who are in were answered within `patience_s`."""
        self.is_draining = True
        try:
            async with asyncio.timeout(patience_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def _note_idleness(self) -> None:
        if self._num_preparing or self._num_open:
            self._is_idle.clear()
        else:
            self._is_idle.set()

    def _is_full(self, num_prompts: int) -> bool:
        refusal_s = self._session.last_refusal_s
        if refusal_s is not None and asyncio.get_running_loop().time() - refusal_s < _REFUSAL_HOLDS_S:
            return True
        # What has not started is in the queue, or is a row whose prompt is being computed. The scheduler knows better,
        # and refuses by itself: this bound spares it, and the tokenizer, what is hopeless.
        cell = self._session.require_cell()
        bound = cell.max_queued_requests + cell.max_num_seqs
        return self._num_preparing + self._session.num_unstarted + num_prompts > bound
