"""Finds stop strings in text that comes in pieces, and holds back what may be the beginning of one.

Each stop string has a Knuth-Morris-Pratt automaton: its state is the length of the longest end of the text so far that
begins the stop string. So one look at each character tells both whether a stop string is complete and how much of the
text must wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """What a piece of text gave."""

    text: str  # may go to the client now
    stop: str | None = None  # the stop string that is complete; the text after it is dropped


class _Matcher:
    """The automaton of one stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0  # chars of `stop` that the text so far ends with
        # fallbacks[n]: the longest proper beginning of `stop` that ends its first n characters.
        self._fallbacks = [0, 0]
        for char in stop[1:]:
            self._fallbacks.append(self._after(self._fallbacks[-1], char))

    def push(self, char: str) -> bool:
        """Take a character; return whether the stop string is complete."""
        self.num_matched = self._after(self.num_matched, char)
        return self.num_matched == len(self.stop)

    def go_on(self) -> None:
        """Look for the stop string again, where it is complete and does not count."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallbacks[self.num_matched]

    def _after(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._fallbacks[num_matched]
        return num_matched + 1 if self.stop[num_matched] == char else 0


class StopStrings:
    """The stop strings of one sequence. The one that completes first wins; of two at the same place the longer one."""

    def __init__(self, stops: Sequence[str], keep_stop: bool) -> None:
        """Take the stop strings (none empty), and whether the text keeps the one that ends it."""
        # Longest first: that is the order in which matchers that complete at the same character are asked.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> Checked:
        """Take the next piece of text; nothing may be pushed after a stop string was complete.

        One that is complete in a piece where it may not end the text does not count.
        """
        if not self._matchers:
            return Checked(text)
        for idx, char in enumerate(text):
            complete = [matcher for matcher in self._matchers if matcher.push(char)]
            if complete and not may_end:
                for matcher in complete:
                    matcher.go_on()
            elif complete:
                stop = complete[0].stop
                seen = self._held + text[: idx + 1]
                return Checked(seen if self._keep_stop else seen[: -len(stop)], stop)
        seen = self._held + text
        num_held = max(matcher.num_matched for matcher in self._matchers)
        self._held = seen[len(seen) - num_held :]
        return Checked(seen[: len(seen) - num_held])

    def flush(self) -> str:
        """Return the text that was held back: the sequence has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held
