"""When to try a peer again that has failed."""


class Breaker:
    """Open after a failure, for twice as long after each further one; what is due then is one more attempt.

    Pure: times are ms of the caller's clock.
    """

    def __init__(self, min_wait_ms: int, max_wait_ms: int) -> None:
        self._min_wait_ms = min_wait_ms
        self._max_wait_ms = max_wait_ms
        self._wait_ms = 0
        self._open_until_ms = 0

    def remaining_ms(self, now_ms: int) -> int:
        """Return how long it stays open; 0: an attempt may be made."""
        return max(0, self._open_until_ms - now_ms) if self._wait_ms else 0

    def fail(self, now_ms: int) -> None:
        """Open, or stay open for longer."""
        self._wait_ms = min(self._max_wait_ms, max(self._min_wait_ms, 2 * self._wait_ms))
        self._open_until_ms = now_ms + self._wait_ms

    def succeed(self) -> None:
        """Close."""
        self._wait_ms = 0
