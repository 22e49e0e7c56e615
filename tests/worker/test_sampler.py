"""The sampler against plain formulas: torch's softmax, sorted filters, penalties written out."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from worker_svc.sampler import Sampler, SamplingRow
from worker_svc.sampling import RowSampling
from worker_svc.sampling_kernels import philox_uniform

VOCAB_SIZE = 512
NO_IDS = np.zeros(0, dtype=np.int64)


def make_row(
    seed: int = 0,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: dict[int, float] | None = None,
    prompt: Sequence[int] = (3,),
    output: Sequence[int] = (),
    sequence_idx: int = 0,
    num_logprobs: int | None = None,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> SamplingRow:
    sampling = RowSampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=seed,
        min_tokens=min_tokens,
        stop_ids=np.array(stop_ids, dtype=np.int64),
        bias_ids=np.array(list(bias or {}), dtype=np.int64),
        bias_values=np.array(list((bias or {}).values()), dtype=np.float32),
        num_logprobs=num_logprobs,
    )
    return SamplingRow(sampling, np.array([*prompt, *output], dtype=np.int32), len(prompt), sequence_idx)


def make_logits(num_rows: int = 1, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    return [choice.token_id for choice in Sampler(logits.shape[1]).sample(logits.clone(), rows)]


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Return the probabilities that the filters leave, by sorting: float64 [vocab]."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    order = torch.argsort(probabilities, descending=True, stable=True)
    if top_k:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= top_p]] = 0
    return probabilities / probabilities.sum()


def chi_square(counts: "np.ndarray[tuple[int], np.dtype[np.int64]]", probabilities: Tensor) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; cells that expect fewer than 5 are taken together."""
    expected = probabilities.numpy() * counts.sum()
    large = expected >= 5
    cells = [(counts[large], expected[large])]
    if expected[~large].sum() >= 5:
        cells.append((counts[~large].sum(keepdims=True), expected[~large].sum(keepdims=True)))
    statistic = sum(float(((found - wanted) ** 2 / wanted).sum()) for found, wanted in cells)
    return statistic, sum(len(found) for found, _ in cells) - 1


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 20, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 0, 1.0, 0.05),
        (0.9, 40, 0.9, 0.02),
    ],
)
def test_frequencies_are_those_of_the_filtered_softmax(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = make_logits(seed=5)
    num_draws = 20_000
    rows = [make_row(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for seed in range(num_draws)]
    tokens: list[int] = []
    sampler = Sampler(VOCAB_SIZE)
    for begin in range(0, num_draws, 1000):
        choices = sampler.sample(logits.repeat(1000, 1), rows[begin : begin + 1000])
        tokens += [choice.token_id for choice in choices if choice.token_id is not None]
    assert len(tokens) == num_draws
    probabilities = filtered(logits[0], temperature, top_k, top_p, min_p)
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert counts[probabilities.numpy() == 0].sum() == 0
    statistic, freedom = chi_square(counts, probabilities)
    # Mean `freedom`, standard deviation sqrt(2 freedom); seeds are fixed, so that this holds or fails for good.
    assert abs(statistic - freedom) < 3 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("top_k", [1, 2, 17, 511, 512, 10_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 1.0])
def test_filters_leave_exactly_what_sorting_leaves(top_k: int, top_p: float) -> None:
    """Logits of few distinct values: the cut goes through ties, which rank by lower id."""
    logits = make_logits(seed=top_k).round() / 2
    wanted = filtered(logits[0], 1.0, top_k, top_p, 0.0)
    allowed = set(torch.nonzero(wanted)[:, 0].tolist())
    rows = [make_row(seed, top_k=top_k, top_p=top_p) for seed in range(300)]
    found = set(sample(logits.repeat(300, 1), rows))
    assert found <= allowed
    if len(allowed) <= 8:
        assert found == allowed


def test_token_is_the_inverse_of_the_distribution_in_token_id_order() -> None:
    logits = make_logits(seed=8)
    for seed in range(200):
        uniform = philox_uniform(np.uint64(seed), np.uint64(0), np.uint64(0))
        cumulative = torch.softmax(logits[0].double(), dim=0).cumsum(0)
        if (cumulative - uniform).abs().min() > 1e-6:
            assert sample(logits, [make_row(seed)]) == [int((cumulative > uniform).nonzero()[0, 0])]


def test_uniform_numbers_are_those_of_philox() -> None:
    """Known answers of Random123 for counter and key 0, and all bits set: the first two words of the block."""

    def from_words(first: int, second: int) -> float:
        return float(((first << 21) ^ (second >> 11)) & (2**53 - 1)) / 2**53

    zero, ones = np.uint64(0), np.uint64(2**64 - 1)
    assert philox_uniform(zero, zero, zero) == from_words(0x6627E8D5, 0xE169C58D)
    assert philox_uniform(ones, ones, ones) == from_words(0x408F276D, 0x41C83B0E)


def test_uniform_numbers_differ_by_seed_sequence_and_position() -> None:
    numbers = [
        philox_uniform(np.uint64(seed), np.uint64(sequence_idx), np.uint64(position))
        for seed, sequence_idx, position in itertools.product(range(20), range(20), range(20))
    ]
    assert len(set(numbers)) == 8000
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.01
    assert abs(np.var(numbers) - 1 / 12) < 0.005


def test_result_does_not_depend_on_the_batch() -> None:
    logits = make_logits(12, seed=3)
    rows = [
        make_row(
            seed, temperature=0.5 + seed / 8, top_k=seed * 5 % 17, top_p=1.0 - seed / 40, repetition=1.0 + seed / 50
        )
        for seed in range(12)
    ]
    together = sample(logits, rows)
    assert [sample(logits[idx : idx + 1], [rows[idx]])[0] for idx in range(12)] == together
    order = [7, 2, 11, 0, 5]
    assert sample(logits[order], [rows[idx] for idx in order]) == [together[idx] for idx in order]


def test_random_position_counts_output_tokens() -> None:
    logits = make_logits(spread=1.0)
    by_position = [sample(logits, [make_row(4, output=[9] * count)])[0] for count in range(12)]
    assert len(set(by_position)) > 6
    other_prompt = [sample(logits, [make_row(4, prompt=[1, 2, 3, 4], output=[8] * count)])[0] for count in range(12)]
    assert other_prompt == by_position
    other_sequence = [sample(logits, [make_row(4, output=[9] * count, sequence_idx=1)])[0] for count in range(12)]
    assert other_sequence != by_position


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [300, 40, 41]] = 5.0
    assert sample(logits, [make_row(temperature=0.0)] * 2) == [40, 0]


def test_greedy_beside_random_rows_is_greedy() -> None:
    logits = make_logits(3)
    rows = [make_row(1), make_row(temperature=0.0), make_row(2)]
    assert sample(logits, rows)[1] == int(logits[1].argmax())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_finite_logits_get_no_token(bad: float, temperature: float) -> None:
    logits = make_logits(3)
    logits[1, 77] = bad
    logits[2] = float("-inf")
    tokens = sample(logits, [make_row(temperature=temperature)] * 3)
    assert tokens[0] is not None
    assert tokens[1:] == [None, None]


def test_penalties_and_bias_follow_the_plain_formula() -> None:
    prompt, output = [5, 9, 9, 200], [9, 31, 31, 31, 7]
    repetition, presence, frequency = 1.3, 0.7, 0.4
    bias = {31: 4.0, 8: -2.5, 500: 1.0}
    logits = make_logits(seed=12)
    wanted = logits[0].clone()
    for token_id, value in bias.items():
        wanted[token_id] += value
    for token_id in {*prompt, *output}:
        wanted[token_id] = wanted[token_id] / repetition if wanted[token_id] > 0 else wanted[token_id] * repetition
    for token_id in set(output):
        wanted[token_id] -= presence + frequency * output.count(token_id)
    row = make_row(
        temperature=0.0,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        bias=bias,
        prompt=prompt,
        output=output,
    )
    adjusted = logits.clone()
    sampler = Sampler(VOCAB_SIZE)
    for _ in range(2):  # the second time shows that the first left nothing behind
        adjusted = logits.clone()
        sampler.sample(adjusted, [row])
    torch.testing.assert_close(adjusted[0], wanted)


def test_log_probabilities_are_those_before_any_filter() -> None:
    logits = make_logits(2, seed=4)
    reference = torch.log_softmax(logits.double(), dim=1)
    rows = [make_row(3, top_k=1, bias={9: 60.0}, num_logprobs=5), make_row(temperature=0.0, num_logprobs=0)]
    choices = Sampler(VOCAB_SIZE).sample(logits.clone(), rows)
    assert choices[0].token_id == 9
    first, second = choices[0].logprobs, choices[1].logprobs
    assert first is not None
    assert second is not None
    assert first.logprob == pytest.approx(float(reference[0, 9]), abs=1e-5)
    assert first.top_token_ids == reference[0].topk(5).indices.tolist()
    assert first.top_logprobs == pytest.approx(reference[0].topk(5).values.tolist(), abs=1e-5)
    assert second.logprob == pytest.approx(float(reference[1].max()), abs=1e-5)
    assert second.top_token_ids == []


def test_alternatives_of_equal_logits_come_by_lower_id() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [90, 20]] = 2.0
    (choice,) = Sampler(VOCAB_SIZE).sample(logits, [make_row(temperature=0.0, num_logprobs=4)])
    assert choice.logprobs is not None
    assert choice.logprobs.top_token_ids == [20, 90, 0, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(seed=2)
    rows = [make_row(seed, temperature=temperature) for seed in range(20)]
    assert set(sample(logits.repeat(20, 1), rows)) == {int(logits.argmax())}


def test_large_vocabulary_with_long_tail() -> None:
    """More tokens than one span of the inversion, most of them with weights that underflow."""
    logits = torch.full((1, 50_001), -1e4)
    logits[0, [7, 40_000, 50_000]] = torch.tensor([1.0, 2.0, 1.5])
    rows = [make_row(seed) for seed in range(300)]
    assert set(sample(logits.repeat(300, 1), rows)) == {7, 40_000, 50_000}
