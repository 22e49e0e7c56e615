"""The sampler for GPUs, run on CPU tensors: the choices of the compiled one, row for row."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.worker.test_sampler import VOCAB_SIZE, make_logits, make_row
from worker_svc import torch_sampler
from worker_svc.sampler import Choice, Sampler, SamplingRow
from worker_svc.torch_sampler import TorchSampler

CPU = torch.device("cpu")


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
    return TorchSampler(logits.shape[1], CPU).sample(logits.clone(), rows)


def token_ids(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    return [choice.token_id for choice in sample(logits, rows)]


def wanted_ids(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    return [choice.token_id for choice in Sampler(logits.shape[1]).sample(logits.clone(), rows)]


def any_row(seed: int) -> SamplingRow:
    """Return a row of parameters that are drawn at random; each filter is off in half of them."""
    dice = random.Random(seed)
    tokens = [dice.randrange(VOCAB_SIZE) for _ in range(dice.randrange(1, 60))]
    num_prompt_tokens = dice.randrange(1, len(tokens) + 1)
    return make_row(
        seed,
        temperature=dice.choice([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=dice.choice([0, 0, 0, 1, 5, 40, 511, 512, 9999]),
        top_p=dice.choice([1.0, 1.0, 1.0, 0.05, 0.5, 0.9, 0.99]),
        min_p=dice.choice([0.0, 0.0, 0.01, 0.2]),
        repetition=dice.choice([1.0, 1.0, 0.8, 1.3]),
        presence=dice.choice([0.0, 0.0, -0.5, 1.1]),
        frequency=dice.choice([0.0, 0.0, -0.2, 0.7]),
        bias={dice.randrange(VOCAB_SIZE): dice.uniform(-9, 9) for _ in range(dice.choice([0, 0, 3]))},
        prompt=tokens[:num_prompt_tokens],
        output=tokens[num_prompt_tokens:],
        sequence_idx=dice.randrange(4),
        num_logprobs=dice.choice([None, None, 0, 1, 5]),
        min_tokens=dice.choice([0, 0, 4, 40]),
        stop_ids=[dice.randrange(VOCAB_SIZE) for _ in range(dice.choice([0, 2]))],
    )


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_every_mix_of_parameters_gives_the_compiled_samplers_tokens(spread: float) -> None:
    rows = [any_row(seed) for seed in range(600)]
    logits = make_logits(len(rows), seed=9, spread=spread)
    found, wanted = token_ids(logits, rows), wanted_ids(logits, rows)
    # Exponentials differ in the last bits: a number that falls between the two cuts may give the neighbour.
    differing = [idx for idx, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    assert len(differing) <= 1


@pytest.mark.parametrize("top_k", [1, 2, 17, 511, 512, 10_000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 1.0])
def test_ties_rank_by_lower_id(top_k: int, top_p: float) -> None:
    logits = (make_logits(seed=top_k).round() / 2).repeat(200, 1)
    rows = [make_row(seed, top_k=top_k, top_p=top_p) for seed in range(200)]
    assert token_ids(logits, rows) == wanted_ids(logits, rows)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [300, 40, 41]] = 5.0
    plain, beside_another = [make_row(temperature=0.0)] * 2, [make_row(temperature=0.0), make_row(1)]
    assert token_ids(logits, plain) == [40, 0]
    assert token_ids(logits, beside_another)[0] == 40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
def test_rows_without_finite_logits_get_no_token(bad: float, changes: dict[str, float]) -> None:
    logits = make_logits(3)
    logits[1, 77] = bad
    logits[2] = float("-inf")
    for num_logprobs in (None, 2):
        row = make_row(temperature=changes["temperature"], top_p=changes.get("top_p", 1.0), num_logprobs=num_logprobs)
        choices = sample(logits, [row] * 3)
        assert choices[0].token_id is not None
        assert choices[1:] == [Choice(None), Choice(None)]


def test_result_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, log probabilities too, and however many rows are worked on at once."""
    rows = [any_row(seed) for seed in range(40)]
    logits = make_logits(len(rows), seed=3)
    together = sample(logits, rows)
    assert [sample(logits[idx : idx + 1], [rows[idx]])[0] for idx in range(40)] == together
    monkeypatch.setattr(torch_sampler, "_CHUNK_ELEMENTS", 3 * VOCAB_SIZE)
    assert sample(logits, rows) == together


def test_log_probabilities_are_the_compiled_samplers() -> None:
    logits = make_logits(4, seed=4)
    logits[2] = 0.0
    logits[2, [90, 20]] = 2.0  # equal ones come by lower id
    rows = [
        make_row(3, top_k=1, bias={9: 60.0}, num_logprobs=5),
        make_row(temperature=0.0, num_logprobs=0),
        make_row(temperature=0.0, num_logprobs=4),
        make_row(temperature=0.0),
    ]
    for found, wanted in zip(sample(logits, rows), Sampler(VOCAB_SIZE).sample(logits.clone(), rows), strict=True):
        assert found.token_id == wanted.token_id
        if wanted.logprobs is None:
            assert found.logprobs is None
            continue
        assert found.logprobs is not None
        assert found.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-5)
        assert found.logprobs.top_token_ids == wanted.logprobs.top_token_ids
        assert found.logprobs.top_logprobs == pytest.approx(wanted.logprobs.top_logprobs, abs=1e-5)


def test_large_vocabulary_with_long_tail() -> None:
    """Most weights are too small for a unit; each of the others is drawn."""
    logits = torch.full((1, 50_001), -1e4)
    logits[0, [7, 40_000, 50_000]] = torch.tensor([1.0, 2.0, 1.5])
    rows = [make_row(seed) for seed in range(300)]
    found = token_ids(logits.repeat(300, 1), rows)
    assert set(found) == {7, 40_000, 50_000}
    assert found == wanted_ids(logits.repeat(300, 1), rows)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(seed=2)
    rows = [make_row(seed, temperature=temperature) for seed in range(20)]
    assert set(token_ids(logits.repeat(20, 1), rows)) == {int(logits.argmax())}


class WaitingCopies(TorchFunctionMode):
    """Notes calls that would copy from pageable memory to a GPU, for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        is_index = func in (Tensor.__getitem__, Tensor.__setitem__)
        indices = args[1] if is_index and isinstance(args[1], tuple) else args[1:2] if is_index else ()
        by_list = any(isinstance(index, list) for index in indices)
        to_device = func is Tensor.to and any(isinstance(value, torch.device) for value in (*args, *kwargs.values()))
        made_there = func is torch.tensor and "device" in kwargs
        if by_list or made_there or (to_device and not kwargs.get("non_blocking")):
            self.found.append(str(func))
        return func(*args, **kwargs)


def test_nothing_that_goes_to_the_device_is_waited_for() -> None:
    rows = [any_row(seed) for seed in range(60)]
    with WaitingCopies() as copies:
        sample(make_logits(len(rows)), rows)
    assert copies.found == []


def test_warming_up_needs_no_logits() -> None:
    TorchSampler(VOCAB_SIZE, CPU).warm_up()
