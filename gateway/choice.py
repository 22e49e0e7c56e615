"""One choice of an answer: tokens in, text out, until the scheduler or a stop string ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.generation import LENGTH, STOP, NewTokens
from gateway.stop_strings import StopStrings
from protos import common_pb2

_FINISH_REASONS: dict[int, str] = {STOP: "stop", LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and those of the likeliest tokens at its place."""

    token_id: int
    logprob: float
    alternatives: Sequence[tuple[int, float]]  # (token id, log probability), best first


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a choice."""

    choice_idx: int
    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None  # OpenAI's; set in a choice's last delta
    stop_reason: int | str | None = None  # the stop token or stop string that the request named


@dataclass(frozen=True, slots=True)
class EndingRules:
    """What of a request decides where its text ends."""

    stop_strings: Sequence[str]
    stop_token_ids: frozenset[int]
    min_tokens: int  # a stop string that is complete before does not count
    keep_stop: bool  # the text keeps the stop string or stop token


class Choice:
    """The text state of one sequence."""

    def __init__(self, idx: int, detokenizer: Detokenizer, rules: EndingRules) -> None:
        self.idx = idx
        self.num_tokens = 0  # kept: up to the one that completed a stop string
        self.is_finished = False
        self.last_token_s: float | None = None  # the loop's clock
        self._detokenizer = detokenizer
        self._rules = rules
        self._stop_strings = StopStrings(rules.stop_strings, rules.keep_stop)

    def push(self, new: NewTokens) -> Delta:
        """Take a step's tokens; return what they add. The choice must not be finished."""
        ended_by_token = new.finish_reason == STOP
        texts: list[str] = []
        stop: str | None = None
        num_kept = 0
        for token_id in new.token_ids:
            num_kept += 1
            self.num_tokens += 1
            # The token that ended the sequence is no part of the text, unless the client wants it.
            if ended_by_token and num_kept == len(new.token_ids) and not self._rules.keep_stop:
                break
            stop = self._push_text(self._detokenizer.push(token_id), texts)
            if stop is not None:
                break
        if stop is None and new.finish_reason:
            stop = self._flush(texts)
        finish_reason = "stop" if stop is not None else _FINISH_REASONS.get(new.finish_reason)
        self.is_finished = finish_reason is not None
        stop_reason: int | str | None = stop
        if stop is None and ended_by_token and new.token_ids and new.token_ids[-1] in self._rules.stop_token_ids:
            stop_reason = new.token_ids[-1]
        logprobs = _logprobs(new.token_ids[:num_kept], new.logprobs) if new.logprobs else ()
        return Delta(self.idx, "".join(texts), logprobs, finish_reason, stop_reason)

    def _push_text(self, text: str, texts: list[str]) -> str | None:
        """Add what may be sent of `text` to `texts`; return the stop string that is complete, if one is."""
        if not text:
            return None
        checked = self._stop_strings.push(text, may_end=self.num_tokens > self._rules.min_tokens)
        texts.append(checked.text)
        return checked.stop

    def _flush(self, texts: list[str]) -> str | None:
        stop = self._push_text(self._detokenizer.flush(), texts)
        if stop is None:
            texts.append(self._stop_strings.flush())
        return stop


def _logprobs(token_ids: Sequence[int], wire: Sequence[common_pb2.TokenLogprobs]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, entry.logprob, list(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
        for token_id, entry in zip(token_ids, wire, strict=False)
    ]
