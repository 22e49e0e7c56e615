"""Text of a growing sequence, one token at a time.

A token's text depends on its neighbours (a character may be spread over several tokens, a first blank may be dropped),
so the last few tokens are decoded together, and what is new at the end is the token's text:

    tokens   ... │ context │ pending │
                 └────── window ─────┘      decode(window)[num_sent_chars:] is what has not been handed out

Text that ends in U+FFFD may be a character whose other bytes are still to come: it waits. When it is complete, the
pending tokens become the context of the next ones.
"""

from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A token has at least one byte, and at most three bytes wait for the rest of their character. So when this many tokens
# end in U+FFFD one after the other, most bytes are broken for good: only the last three signs may still change.
_MAX_PENDING_TOKENS = 16
_MAX_HELD_CHARS = 3
# Tokens that then stay: three signs stand for up to nine bytes, and a decoder that begins in the middle of a character
# is in step again after three.
_NUM_KEPT_TOKENS = 12
# Of a text that is continued the last token is enough, unless it is a part of a character.
_MAX_CONTINUED_TOKENS = 5


class Detokenizer:
    """Decodes one sequence. All texts that `push` and `flush` return, joined, are the sequence's text."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], silent_ids: Container[int], continued_ids: Sequence[int] = ()
    ) -> None:
        """Take the decoder of a list of tokens, and the ids that have no text (skipped special tokens, gaps).

        Where the sequence continues a text, that text's tokens are its first context; else it begins one.
        """
        self._decode = decode
        self._silent_ids = silent_ids
        self._window = self._last_whole_tokens(continued_ids)
        self._num_context_tokens = len(self._window)
        self._num_sent_chars = len(decode(self._window)) if self._window else 0  # of the window's text

    def push(self, token_id: int) -> str:
        """Append a token; return the text that is complete now, often of this token alone, sometimes none."""
        # A decoder is not shown silent tokens, or an endless run of them would make the window grow without end.
        if token_id in self._silent_ids:
            return ""
        window = self._window
        window.append(token_id)
        text = self._decode(window)
        if text.endswith(_REPLACEMENT):
            return self._push_incomplete(text)
        new_text = text[self._num_sent_chars :]
        if new_text:
            del window[: self._num_context_tokens]
            self._num_context_tokens = len(window)
            self._num_sent_chars = len(self._decode(window))
        return new_text

    def flush(self) -> str:
        """Return what was held back; nothing may be pushed after it."""
        return self._decode(self._window)[self._num_sent_chars :]

    def _last_whole_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens, as few as make whole characters; none where the text may end within one."""
        tail = [token_id for token_id in token_ids[-_MAX_CONTINUED_TOKENS:] if token_id not in self._silent_ids]
        for begin in reversed(range(len(tail))):
            if not self._decode(tail[begin:]).endswith(_REPLACEMENT):
                return tail[begin:]
        return []

    def _push_incomplete(self, text: str) -> str:
        if len(self._window) - self._num_context_tokens < _MAX_PENDING_TOKENS:
            return ""
        num_held_chars = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HELD_CHARS)
        new_text = text[self._num_sent_chars : len(text) - num_held_chars]
        del self._window[:-_NUM_KEPT_TOKENS]
        self._num_context_tokens = 0
        self._num_sent_chars = len(self._decode(self._window)) - num_held_chars
        return new_text
