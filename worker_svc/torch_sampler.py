"""The sampler for logits that lie on a GPU: the same choices as `sampler.py`, in torch operations on all rows at once.

Logits stay where they are; a step sends back one token id a row (at 128 thousand tokens of vocabulary a row of logits
is half a megabyte). Where every row is greedy and asks for nothing else, that is one reduction and one copy. The host
waits for the device as it reads token ids, and log probabilities; what goes to the device is sent without waiting,
indices of rows too: a Python list for an index would be copied from pageable memory.

Sums of weights are sums of integers, in units of 2**-40 of the likeliest token's weight: whatever order a device adds
them in, the sum is the same, so a row's token depends neither on the batch nor on the run. What is rounded away is less
than the float32 weights' own error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from worker_svc.sampler import Choice, Logprobs, SamplingRow, demanding_rows, uniform_of
from worker_svc.sampling_kernels import TOKEN_OF_BAD_ROW
from worker_svc.staging import to_device

_UNITS = 2.0**40  # of weight 1; the sum of 2**22 tokens' stays below 2**63
_CHUNK_ELEMENTS = 1 << 22  # logits worked on at once by what needs ten times their memory

_Item = TypeVar("_Item")


class TorchSampler:
    """TokenSampler on any device that torch has."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._chunk_rows = max(1, _CHUNK_ELEMENTS // vocab_size)

    def warm_up(self) -> None:
        """See TokenSampler."""
        self.sample(torch.zeros(1, self._vocab_size, device=self._device), demanding_rows(1))

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
        """See TokenSampler."""
        if all(row.sampling.is_plain for row in rows):
            return [_choice(token_id) for token_id in _best_tokens(logits).tolist()]
        reported_idxs = [idx for idx, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        raw_logits = logits.index_select(0, self._indices(reported_idxs)) if reported_idxs else None
        self._adjust(logits, rows)
        token_ids = _best_tokens(logits)
        for idxs in self._random_chunks(rows):
            draw = _Draw.of([rows[idx] for idx in idxs], self._device)
            row_idxs = self._indices(idxs)
            token_ids.index_copy_(0, row_idxs, _draw_tokens(logits.index_select(0, row_idxs), draw))
        choices = [_choice(token_id) for token_id in token_ids.tolist()]
        if raw_logits is not None:
            self._add_logprobs(choices, raw_logits, reported_idxs, rows)
        return choices

    # ---- before the temperature

    def _adjust(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        """Apply to the logits, in place, whatever comes before the temperature: biases, minimum length, penalties."""
        self._add_biases(logits, rows)
        held = [idx for idx, row in enumerate(rows) if row.num_output_tokens < row.sampling.min_tokens]
        if held:
            at = self._places([(idx, rows[idx].sampling.stop_ids) for idx in held])
            logits.index_put_(at, torch.full((), -torch.inf, device=self._device))
        penalized = [idx for idx, row in enumerate(rows) if row.sampling.has_penalties]
        for idxs in _chunks(penalized, self._chunk_rows):
            row_idxs = self._indices(idxs)
            penalized_logits = self._penalized(logits.index_select(0, row_idxs), [rows[idx] for idx in idxs])
            logits.index_copy_(0, row_idxs, penalized_logits)

    def _add_biases(self, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        biased = [(idx, row.sampling) for idx, row in enumerate(rows) if len(row.sampling.bias_ids)]
        if biased:
            values = np.concatenate([sampling.bias_values for _, sampling in biased])
            at = self._places([(idx, sampling.bias_ids) for idx, sampling in biased])
            logits.index_put_(at, self._tensor(values), accumulate=True)

    def _penalized(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return logits [R, vocab] of rows with their penalties: repetition over all tokens, the others over output."""
        places = self._places([(idx, row.token_ids) for idx, row in enumerate(rows)])
        is_output = np.concatenate([np.arange(len(row.token_ids)) >= row.num_prompt_tokens for row in rows])
        occurs = torch.zeros_like(logits, dtype=torch.bool)
        occurs[places] = True
        counts = torch.zeros_like(logits, dtype=torch.int32)
        counts.index_put_(places, self._tensor(is_output.astype(np.int32)), accumulate=True)
        repetition = self._column([row.sampling.repetition_penalty for row in rows], torch.float32)
        presence = self._column([row.sampling.presence_penalty for row in rows], torch.float32).to(torch.float64)
        frequency = self._column([row.sampling.frequency_penalty for row in rows], torch.float32).to(torch.float64)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        less = torch.where(counts > 0, presence + frequency * counts, 0.0)
        return torch.where(occurs, (repeated - less).to(torch.float32), logits)

    # ---- random rows

    def _random_chunks(self, rows: Sequence[SamplingRow]) -> Iterator[list[int]]:
        """Return the indices of rows that are drawn at random, few at a time: those that need a sort apart."""
        drawn = [idx for idx, row in enumerate(rows) if not row.sampling.is_greedy]
        for needs_sort in (False, True):
            kind = [idx for idx in drawn if _needs_sort(rows[idx]) is needs_sort]
            yield from _chunks(kind, self._chunk_rows)

    # ---- log probabilities

    def _add_logprobs(
        self, choices: list[Choice], raw_logits: Tensor, idxs: Sequence[int], rows: Sequence[SamplingRow]
    ) -> None:
        """Add log softmax of `raw_logits` (those of rows `idxs`) at the chosen tokens and at the best ones."""
        num_tops = [min(rows[idx].sampling.num_logprobs or 0, self._vocab_size) for idx in idxs]
        token_ids = [choices[idx].token_id or 0 for idx in idxs]
        for chunk in _chunks(list(range(len(idxs))), self._chunk_rows):
            logits = raw_logits[chunk[0] : chunk[-1] + 1]
            totals = torch.logsumexp(logits.to(torch.float64), dim=1, keepdim=True)
            chosen = logits.gather(1, self._column([token_ids[place] for place in chunk], torch.int64))
            best, best_ids = _best_first(logits, max(num_tops[place] for place in chunk))
            # One copy: ids are exact in float64.
            packed = torch.cat((chosen - totals, best - totals, best_ids.to(torch.float64)), dim=1).tolist()
            for place, values in zip(chunk, packed, strict=True):
                idx, num_top, num_best = idxs[place], num_tops[place], best.shape[1]
                token_id = choices[idx].token_id
                if token_id is not None:
                    top_ids = [int(value) for value in values[1 + num_best :][:num_top]]
                    choices[idx] = Choice(token_id, Logprobs(values[0], top_ids, values[1 : 1 + num_top]))

    # ---- to the device

    def _places(
        self, ids_of_rows: Sequence[tuple[int, "np.ndarray[tuple[int], np.dtype[np.integer]]"]]
    ) -> tuple[Tensor, Tensor]:
        """Return (rows, token ids), each int64 [n], of token ids given row by row."""
        counts = [len(ids) for _, ids in ids_of_rows]
        rows = np.repeat(np.array([idx for idx, _ in ids_of_rows], dtype=np.int64), counts)
        ids = np.concatenate([ids for _, ids in ids_of_rows]).astype(np.int64)
        sent = self._tensor(np.stack((rows, ids)))
        return sent[0], sent[1]

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._device)[:, None]

    def _indices(self, idxs: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(idxs, dtype=torch.int64), self._device)

    def _tensor(self, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
        return to_device(torch.from_numpy(array), self._device)


@dataclass(frozen=True, slots=True)
class _Draw:
    """How rows are drawn; each tensor is [R, 1] on the logits' device."""

    temperature: Tensor  # float32
    min_p: Tensor  # float32
    uniform: Tensor  # float64
    top_k: Tensor  # int64; the vocabulary's size and above: off
    top_p: Tensor  # float64
    needs_sort: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], device: torch.device) -> "_Draw":
        """Return those of rows, in one copy."""
        values = [
            (
                row.sampling.temperature,
                row.sampling.min_p,
                uniform_of(row),
                row.sampling.top_k or torch.iinfo(torch.int32).max,
                row.sampling.top_p,
            )
            for row in rows
        ]
        temperature, min_p, uniform, top_k, top_p = (
            to_device(torch.tensor(values, dtype=torch.float64), device).unsqueeze(2).unbind(1)
        )
        return cls(
            temperature.to(torch.float32),
            min_p.to(torch.float32),
            uniform,
            top_k.to(torch.int64),
            torch.where(top_p < 1.0, top_p, torch.inf),
            any(_needs_sort(row) for row in rows),
        )


def _draw_tokens(logits: Tensor, draw: _Draw) -> Tensor:
    """Return the tokens, int64 [R], of logits [R, vocab]; TOKEN_OF_BAD_ROW where a row's are not finite.

    The order of filters is min-p, top-k, top-p, each over what the one before left; what they leave stays in token-id
    order, in which the cumulative distribution is inverted.
    """
    largest = logits.max(dim=1, keepdim=True).values
    weights = torch.exp((logits - largest) / draw.temperature)
    units = (weights * _UNITS).to(torch.int64)
    units.masked_fill_(weights < draw.min_p, 0)
    if draw.needs_sort:
        units = _filtered(weights, units, draw)
    cumulative = units.cumsum(dim=1)
    total = cumulative[:, -1:]
    # Below the total even where the product is rounded up to it.
    target = torch.minimum((draw.uniform * total).to(torch.int64), total - 1)
    token_ids = torch.searchsorted(cumulative, target, right=True)
    return torch.where(largest.isfinite(), token_ids, TOKEN_OF_BAD_ROW)[:, 0]


def _filtered(weights: Tensor, units: Tensor, draw: _Draw) -> Tensor:
    """Return `units` [R, vocab] with 0 for tokens that top-k and top-p leave out; equal weights rank by lower id."""
    order = weights.sort(dim=1, descending=True, stable=True).indices
    ranked = units.gather(1, order)
    ranked.masked_fill_(torch.arange(units.shape[1], device=units.device) >= draw.top_k, 0)
    cumulative = ranked.cumsum(dim=1)
    amount = draw.top_p * cumulative[:, -1:]
    ranked.masked_fill_(cumulative - ranked >= amount, 0)
    return torch.zeros_like(units).scatter_(1, order, ranked)


def _best_tokens(logits: Tensor) -> Tensor:
    """Return the lowest id of each row's largest logit, int64 [R]; TOKEN_OF_BAD_ROW where that is not finite."""
    best = logits.max(dim=1)  # of equals, the first
    return torch.where(best.values.isfinite(), best.indices, TOKEN_OF_BAD_ROW)


def _best_first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row and their ids, best first, equal ones by lower id."""
    if count == 0:
        return logits[:, :0], logits[:, :0]
    ranked = logits.sort(dim=1, descending=True, stable=True)
    return ranked.values[:, :count], ranked.indices[:, :count]


def _choice(token_id: int) -> Choice:
    return Choice(None if token_id == TOKEN_OF_BAD_ROW else token_id)


def _needs_sort(row: SamplingRow) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1.0


def _chunks(items: Sequence[_Item], size: int) -> Iterator[list[_Item]]:
    for begin in range(0, len(items), size):
        yield list(items[begin : begin + size])
