"""From logits to tokens: biases and penalties, then a greedy choice or one random number a row.

Randomness is a function of (seed, sequence index, position among the output tokens), so a row's token depends neither
on the batch nor on which worker computes it, and a replayed sequence gets the tokens that it had.

The order is that of most engines: logit bias, minimum length, penalties, temperature, min-p, top-k, top-p. Log
probabilities are those of the model's own logits, before any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.sampling import RowSampling
from worker_svc.sampling_kernels import TOKEN_OF_BAD_ROW, best_tokens, choose_tokens, penalize, philox_uniform

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row that samples."""

    sampling: RowSampling
    token_ids: npt.NDArray[np.int32]  # all tokens the row has
    num_prompt_tokens: int
    sequence_idx: int  # among the request's n sequences

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far: the random position of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of one sampled token and of its alternatives."""

    logprob: float
    top_token_ids: list[int]  # best first
    top_logprobs: list[float]  # parallel to top_token_ids


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's sampled token; None where its logits were not finite."""

    token_id: int | None
    logprobs: Logprobs | None = None


class TokenSampler(Protocol):
    """What chooses the next token of each row. One thread alone may use it."""

    def warm_up(self) -> None:
        """Compile, or load, whatever sampling needs."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
        """Return the choice of each row. `logits` is float32 [rows, vocab] and is overwritten."""


class Sampler:
    """TokenSampler for logits in main memory. It keeps scratch memory."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, dtype=np.int32)
        self._ids = np.empty((0, vocab_size), dtype=np.int32)

    def warm_up(self) -> None:
        """Compile, or load from Numba's cache, every kernel."""
        self.sample(torch.zeros(1, len(self._counts)), demanding_rows(1))

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
        """Return the choice of each row. `logits` is float32 [rows, vocab] and is overwritten."""
        if all(row.sampling.is_plain for row in rows):
            return _take_best(*_best(logits))
        host_logits: FloatArray = logits.numpy()
        wants_logprobs = [row.sampling.num_logprobs is not None for row in rows]
        raw_logits = {idx: host_logits[idx].copy() for idx, wanted in enumerate(wants_logprobs) if wanted}
        for idx, row in enumerate(rows):
            self._adjust(host_logits[idx], row)

        # Before the random rows overwrite theirs.
        choices = _take_best(*_best(torch.from_numpy(host_logits)))
        random_idxs = [idx for idx, row in enumerate(rows) if not row.sampling.is_greedy]
        if random_idxs:
            drawn_ids = self._choose(host_logits, random_idxs, rows)
            for idx, drawn_id in zip(random_idxs, drawn_ids, strict=True):
                choices[idx] = Choice(None if drawn_id == TOKEN_OF_BAD_ROW else drawn_id)
        for idx, raw in raw_logits.items():
            token_id, num_logprobs = choices[idx].token_id, rows[idx].sampling.num_logprobs
            if token_id is not None:
                choices[idx] = Choice(token_id, logprobs_of(raw, token_id, num_logprobs or 0))
        return choices

    def _adjust(self, logits: FloatArray, row: SamplingRow) -> None:
        """Apply to one row's logits [vocab], in place, whatever comes before the temperature."""
        sampling = row.sampling
        if len(sampling.bias_ids):
            np.add.at(logits, sampling.bias_ids, sampling.bias_values)
        if row.num_output_tokens < sampling.min_tokens and len(sampling.stop_ids):
            logits[sampling.stop_ids] = -np.inf
        if sampling.has_penalties:
            penalize(
                logits,
                row.token_ids,
                row.num_prompt_tokens,
                np.float32(sampling.repetition_penalty),
                np.float32(sampling.presence_penalty),
                np.float32(sampling.frequency_penalty),
                self._counts,
            )

    def _choose(self, logits: FloatArray, row_idxs: list[int], rows: Sequence[SamplingRow]) -> list[int]:
        """Return the tokens of the rows that are drawn at random."""
        if len(self._ids) < len(row_idxs):
            self._ids = np.empty((len(row_idxs), logits.shape[1]), dtype=np.int32)
        drawn = [rows[idx] for idx in row_idxs]
        token_ids = np.empty(len(drawn), dtype=np.int64)
        choose_tokens(
            logits,
            np.array(row_idxs, dtype=np.int64),
            np.array([row.sampling.temperature for row in drawn], dtype=np.float32),
            np.array([row.sampling.top_k for row in drawn], dtype=np.int64),
            np.array([row.sampling.top_p for row in drawn], dtype=np.float64),
            np.array([row.sampling.min_p for row in drawn], dtype=np.float32),
            np.array([uniform_of(row) for row in drawn], dtype=np.float64),
            self._ids,
            token_ids,
        )
        return token_ids.tolist()


def logprobs_of(logits: FloatArray, token_id: int, num_top: int) -> Logprobs:
    """Return log softmax of `logits` [vocab] at a token and at the `num_top` best ones, equal ones by lower id."""
    largest = logits.max()
    log_total = largest + np.log(np.exp(logits - largest).sum(dtype=np.float64))
    top_ids = np.empty(min(num_top, len(logits)), dtype=np.int64)
    if num_top:
        best_tokens(logits, len(top_ids), top_ids)
    return Logprobs(float(logits[token_id] - log_total), top_ids.tolist(), (logits[top_ids] - log_total).tolist())


def uniform_of(row: SamplingRow) -> float:
    """Return the random number in [0, 1) that decides the row's next token."""
    uniform: float = philox_uniform(
        np.uint64(row.sampling.seed), np.uint64(row.sequence_idx), np.uint64(row.num_output_tokens)
    )
    return uniform


def demanding_rows(num_rows: int) -> list[SamplingRow]:
    """Return rows that need everything a sampler can do."""
    sampling = RowSampling(
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        seed=0,
        min_tokens=1,
        stop_ids=np.zeros(1, dtype=np.int64),
        bias_ids=np.zeros(1, dtype=np.int64),
        bias_values=np.zeros(1, dtype=np.float32),
        num_logprobs=1,
    )
    return [SamplingRow(sampling, np.zeros(1, dtype=np.int32), 1, 0)] * num_rows


def _best(logits: Tensor) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Return the lowest id of each row's largest logit, and that logit (NaN where the row has one)."""
    host_logits = logits.numpy()  # ten times faster than torch's argmax here; takes the first of equals too
    ids = host_logits.argmax(axis=1)
    return ids, host_logits[np.arange(len(ids)), ids]


def _take_best(ids: npt.NDArray[np.int64], logits: FloatArray) -> list[Choice]:
    is_finite = np.isfinite(logits)
    return [Choice(token_id if good else None) for token_id, good in zip(ids.tolist(), is_finite.tolist(), strict=True)]
