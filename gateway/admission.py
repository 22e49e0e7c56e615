"""Who is let in: nobody while the gateway drains, and no more than the cell's queue holds, known before tokenizing.

A tenant has room for so many requests; all together have twice that room, so nobody takes the last place from others.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import InvalidRequestError, OverloadedError, UnavailableError
from gateway.session import SchedulerSession


class Admission:
    """Counts requests from the moment they come in until they are answered."""

    def __init__(self, session: SchedulerSession) -> None:
        self._session = session
        self._num_preparing: Counter[str] = Counter()  # by tenant
        self._num_open = 0
        self._most_rows = 0  # that the cell ever had: workers come back
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False

    def check_size(self, num_seqs: int, param: str) -> None:
        """Raise InvalidRequestError, naming `param`, when a request has more sequences than an idle cell lets in.

        It is no matter of trying again later. Raises UnavailableError before a worker has registered.
        """
        cell = self._session.require_cell()
        self._most_rows = max(self._most_rows, cell.max_num_seqs)
        most = cell.max_queued_requests + self._most_rows
        if num_seqs > most:
            raise InvalidRequestError(
                f"`{param}`: the request asks for {num_seqs} sequences, more than the {most} that this server takes "
                "of a client at once.",
                param,
            )

    @contextmanager
    def preparing(self, num_prompts: int, tenant: str) -> Iterator[None]:
        """Hold places for prompts of a tenant that are about to be tokenized and submitted.

        Raises UnavailableError while draining and OverloadedError when the queue is full for the tenant.
        """
        if self.is_draining:
            raise UnavailableError("The server is shutting down.")
        if self._is_full(num_prompts, tenant):
            raise OverloadedError("The server's queue is full: try again in a moment.")
        self._num_preparing[tenant] += num_prompts
        self._note_idleness()
        try:
            yield
        finally:
            self._num_preparing[tenant] -= num_prompts
            if not self._num_preparing[tenant]:
                del self._num_preparing[tenant]
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

    def _is_full(self, num_prompts: int, tenant: str) -> bool:
        session = self._session
        if session.was_refused(tenant):
            return True
        # What has not started is in the queue, or is a row whose prompt is being computed. The scheduler knows better,
        # and refuses by itself: this bound spares it, and the tokenizer, what is hopeless.
        cell = session.require_cell()
        num_own = self._num_preparing[tenant] + session.num_unstarted_of(tenant) + num_prompts
        num_all = self._num_preparing.total() + session.num_unstarted + num_prompts
        most_own, most_all = cell.max_queued_requests, 2 * cell.max_queued_requests
        return num_own > most_own + cell.max_num_seqs or num_all > most_all + cell.max_num_seqs
