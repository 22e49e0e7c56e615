"""Beam search, on values alone: which continuations of a prompt go on, which are complete, and which answers are best.

    live        [beam 0 | beam 1 | ...]   at most `width`, best first; each is a row of a worker
                   │ its 2 * width likeliest next tokens
                   ▼
    candidates  a stop token completes a beam; of the others the best `width` are the next live beams
    completed   the best `width` so far

A beam's score is the sum of its tokens' log probabilities / (length ** length_penalty), where the length is that of
prompt and output together without the stop token. This, and that every live beam offers twice the width, is how vLLM
searches (`vllm/beam_search.py` and its `beam_search`): same model, same answers. It goes on until `max_tokens`; here
the search is over as soon as no live beam can come to be among the answers, which does not change them.

Sums are float64. Of equal candidates the one of the better beam goes first, then the lower token id; of equal answers
the one that was complete first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from scheduler_svc.core.types import BeamParams, FinishReason, PickedLogprobs, TopLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation of the prompt; `parent_idx` is the place among the live beams of the one it was made from."""

    token_ids: tuple[int, ...] = ()  # output tokens, the stop token too
    logprob: float = 0.0  # of all of them together
    logprobs: tuple[PickedLogprobs, ...] = ()  # of each, where the client wants them
    finish_reason: FinishReason = FinishReason.LENGTH  # when nothing is added any more
    parent_idx: int = 0


class _Candidate(NamedTuple):
    """A beam and a next token; the smallest is the best."""

    neg_logprob: float
    parent_idx: int
    token_id: int
    token_logprob: float


@dataclass(slots=True)
class BeamSearch:
    """One request's search."""

    params: BeamParams
    width: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    completed: list[Beam] = field(default_factory=list)  # best first
    num_losses: int = 0  # in a row, without getting further than ever
    _furthest_tokens: int = 0  # output tokens of the longest live beam there ever was
    _num_uncharged: int = 0  # tokens of live beams that were not there before it started over

    def start_over(self) -> None:
        """Begin with the prompt again."""
        self.live, self.completed = [Beam()], []

    def advance(self, tops: Sequence[TopLogprobs]) -> None:
        """Take the likeliest next tokens of each live beam, and let the best candidates be the live beams."""
        going_on: list[_Candidate] = []
        for candidate in sorted(self._candidates(tops)):
            if candidate.token_id in self.stop_token_ids:
                self.completed.append(self._extend(candidate, tops, FinishReason.STOP))
            else:
                going_on.append(candidate)
        self.completed = self._best(self.completed)
        self.live = [self._extend(candidate, tops, FinishReason.LENGTH) for candidate in going_on[: self.width]]
        if self.live and len(self.live[0].token_ids) > self._furthest_tokens:
            self._furthest_tokens, self.num_losses = len(self.live[0].token_ids), 0
            self._num_uncharged += len(self.live)

    def take_uncharged(self) -> int:
        """Return how many tokens it was served since this was asked last, none of them twice."""
        num_tokens, self._num_uncharged = self._num_uncharged, 0
        return num_tokens

    def is_over(self, max_tokens: int) -> bool:
        """Return whether the answers are known, at most `max_tokens` long."""
        if not self.live or len(self.live[0].token_ids) >= max_tokens:
            return True
        if len(self.completed) < self.width:
            return False
        # More tokens never make the sum larger: at best it stays as it is, at the length that suits it best.
        best = self.live[0]
        lengths = (len(best.token_ids), max_tokens)
        hope = max(self._score(best.logprob, self.num_prompt_tokens + length) for length in lengths)
        return self._score_of(self.completed[-1]) >= hope

    def answers(self) -> list[Beam]:
        """Return the best `width` of all beams, best first."""
        return self._best([*self.completed, *self.live])

    def _candidates(self, tops: Sequence[TopLogprobs]) -> list[_Candidate]:
        return [
            _Candidate(-(beam.logprob + logprob), parent_idx, token_id, logprob)
            for parent_idx, (beam, top) in enumerate(zip(self.live, tops, strict=True))
            for token_id, logprob in islice(zip(top.top_token_ids, top.top_logprobs, strict=True), 2 * self.width)
        ]

    def _extend(self, candidate: _Candidate, tops: Sequence[TopLogprobs], finish_reason: FinishReason) -> Beam:
        parent, num_top = self.live[candidate.parent_idx], self.params.num_logprobs
        logprobs = parent.logprobs
        if num_top is not None:
            logprobs = (*logprobs, PickedLogprobs(candidate.token_logprob, tops[candidate.parent_idx], num_top))
        return Beam(
            (*parent.token_ids, candidate.token_id),
            -candidate.neg_logprob,
            logprobs,
            finish_reason,
            candidate.parent_idx,
        )

    def _best(self, beams: list[Beam]) -> list[Beam]:
        """Return the `width` beams of the highest score; of equal ones the first come first."""
        return sorted(beams, key=self._score_of, reverse=True)[: self.width]

    def _score_of(self, beam: Beam) -> float:
        num_tokens = len(beam.token_ids) - (beam.finish_reason is FinishReason.STOP)
        return self._score(beam.logprob, self.num_prompt_tokens + num_tokens)

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self.params.length_penalty)
