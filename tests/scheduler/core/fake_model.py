"""A model without weights: what it samples after a prefix, and what undisturbed runs of it give.

It sees a prefix as one number, a fingerprint of all its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

VOCAB_SIZE = 50
SPOILT = -(10**9)  # in place of a fingerprint: what a row that failed was to write


@dataclass(frozen=True)
class BeamSampling:
    """What a worker is told of a row of a beam search."""

    seed: int
    num_top: int  # tokens that it reports with each that it samples


@dataclass(frozen=True)
class Top:
    """The likeliest tokens at a place."""

    top_token_ids: list[int]
    top_logprobs: list[float]


def fingerprint(before: int, token_id: int) -> int:
    """Fold one token into the fingerprint of the tokens before it."""
    return hash((before, token_id))


def next_token(prefix: int, seed: int, sequence_idx: int) -> int:
    """Return what the fake model samples after a prefix."""
    if prefix == SPOILT:
        return VOCAB_SIZE
    return hash((prefix, seed, sequence_idx)) % VOCAB_SIZE


def expected_tokens(
    prompt: list[int], seed: int, sequence_idx: int, max_tokens: int, stops: frozenset[int]
) -> list[int]:
    """Return the output of an undisturbed run."""
    prefix = 0
    for token_id in prompt:
        prefix = fingerprint(prefix, token_id)
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] not in stops):
        output.append(next_token(prefix, seed, sequence_idx))
        prefix = fingerprint(prefix, output[-1])
    return output


def top_of(prefix: int, seed: int, num_top: int) -> Top:
    """Return the fake model's likeliest tokens after a prefix; some are equally likely."""
    logprobs = {token_id: -(hash((prefix, seed, token_id)) % 200) / 20 for token_id in range(VOCAB_SIZE)}
    best = sorted(logprobs, key=lambda token_id: (-logprobs[token_id], token_id))[:num_top]
    return Top(best, [logprobs[token_id] for token_id in best])


def expected_beams(
    prompt: list[int], seed: int, width: int, length_penalty: float, max_tokens: int, stops: frozenset[int]
) -> list[list[int]]:
    """Return the answers of an undisturbed beam search, best first."""

    def top_after(token_ids: list[int]) -> Top:
        prefix = 0
        for token_id in token_ids:
            prefix = fingerprint(prefix, token_id)
        return top_of(prefix, seed, 2 * width)

    answers = plain_beam_search(prompt, top_after, width, length_penalty, max_tokens, stops)
    return [output for output, _ in answers]


def plain_beam_search(
    prompt: list[int],
    top_after: Callable[[list[int]], Top],
    width: int,
    length_penalty: float,
    max_tokens: int,
    stops: frozenset[int],
) -> list[tuple[list[int], float]]:
    """Search step by step until `max_tokens`, with nothing clever; return outputs and log probabilities, best first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    completed: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        candidates = []
        for output, total in live:
            top = top_after([*prompt, *output])
            for token_id, logprob in zip(top.top_token_ids, top.top_logprobs, strict=True):
                candidates.append(([*output, token_id], total + logprob))
        candidates.sort(key=lambda candidate: -candidate[1])  # stable: by beam, then by token id where that is equal
        completed += [candidate for candidate in candidates if candidate[0][-1] in stops]
        live = [candidate for candidate in candidates if candidate[0][-1] not in stops][:width]

    def score(answer: tuple[list[int], float]) -> float:
        num_tokens = len(prompt) + len(answer[0]) - (answer[0][-1] in stops)
        return float(answer[1] / num_tokens**length_penalty)

    return sorted([*completed, *live], key=score, reverse=True)[:width]
