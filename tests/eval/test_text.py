"""Perplexity and KL: native's are what `transformers` computes in one pass, and quantized blocks make a difference."""

from pathlib import Path

import pytest
import torch

from quire.eval.results import Results
from quire.eval.text import TextScore, cut_windows, measure_text, score_windows
from scheduler_svc.core.precision import parse_policy
from tests.eval.conftest import BLOCK_SIZE, Tiny, make_tiny

TOKENS = [(5 * idx * idx + idx + 3) % 97 for idx in range(150)]


def score(tiny: Tiny, tokens: list[int], *policies: str, prefix: tuple[int, ...] = ()) -> list[TextScore]:
    parsed = [parse_policy(policy) for policy in policies]
    return score_windows(tiny.rows(), [tokens], parsed, prefix, lambda _: None)[0]


@pytest.mark.parametrize("name", ["llama-tied", "mistral-window"])
@pytest.mark.parametrize("num_tokens", [2, BLOCK_SIZE + 1, 45])
def test_native_is_what_transformers_computes(name: str, num_tokens: int, tmp_path: Path) -> None:
    tiny = make_tiny(name, tmp_path)
    (native,) = score(tiny, TOKENS[:num_tokens], "native")
    log_probs = torch.log_softmax(tiny.saved.expected_logits(TOKENS[: num_tokens - 1]).double(), dim=-1)
    expected = -log_probs[range(num_tokens - 1), TOKENS[1:num_tokens]].sum()
    assert native.num_tokens == num_tokens - 1
    assert native.nll_nats == pytest.approx(float(expected), rel=1e-5)
    assert (native.kl_nats, native.num_agreed) == (0.0, num_tokens - 1)


@pytest.mark.parametrize("prefix", [(5,), tuple(range(11))], ids=["one", "longer-than-a-block"])
def test_prefix_is_seen_and_not_scored(tiny: Tiny, prefix: tuple[int, ...]) -> None:
    (native,) = score(tiny, TOKENS[:40], "native", prefix=prefix)
    logits = tiny.saved.expected_logits([*prefix, *TOKENS[:39]]).double()
    log_probs = torch.log_softmax(logits[len(prefix) :], dim=-1)
    assert native.num_tokens == 39  # the window before predicts the first
    assert native.nll_nats == pytest.approx(-float(log_probs[range(39), TOKENS[1:40]].sum()), rel=1e-5)


def test_narrower_formats_cost_more(tiny: Tiny) -> None:
    native, again, int8, mixed, int4 = score(
        tiny, TOKENS, "native", "native", "native:1,int8", "native:2,int8:4,int4", "native:1,int4"
    )
    assert abs(again.kl) < 1e-9
    assert 1e-9 < int8.kl < int4.kl
    assert int8.kl < mixed.kl < int4.kl
    assert native.agreement == 1.0 >= int8.agreement >= int4.agreement
    assert int8.nll_nats != native.nll_nats


def test_nothing_is_lost_before_a_narrowed_block_is_read(tiny: Tiny) -> None:
    # The first three blocks are the sink, the newest full one, and the one being written.
    early = score(tiny, TOKENS[: 3 * BLOCK_SIZE + 1], "native", "native:1,int4")[1]
    later = score(tiny, TOKENS[: 3 * BLOCK_SIZE + 2], "native", "native:1,int4")[1]
    assert abs(early.kl_nats) < 1e-6
    assert later.kl_nats > 1e-5


def test_windows_predict_every_token_but_the_first_once() -> None:
    windows = cut_windows(list(range(150)), 64)
    assert [window[0] for window in windows] == [0, 64, 128]
    assert [token for window in windows for token in window[1:]] == list(range(1, 150))
    assert [token for window in cut_windows(list(range(129)), 64) for token in window[1:]] == list(range(1, 129))


def test_windows_are_scored_apart(tiny: Tiny) -> None:
    session = tiny.session("int4")
    total = measure_text(session, TOKENS, 64)
    parts = [score(tiny, list(window), "native", "native:1,int4")[1] for window in cut_windows(TOKENS, 64)]
    expected = sum(parts, TextScore())
    assert total["native:1,int4"].num_tokens == 149
    assert total["native:1,int4"].nll_nats == pytest.approx(expected.nll_nats, rel=1e-6)
    assert total["native:1,int4"].kl_nats == pytest.approx(expected.kl_nats, rel=1e-3)


def test_what_was_measured_is_not_measured_again(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    first = measure_text(tiny.session("int4", Results(path)), TOKENS, 64)
    computed: list[list[str]] = []

    def note(*arguments: object) -> list[list[TextScore]]:
        computed.append([str(policy) for policy in arguments[2]])  # type: ignore[attr-defined]
        return score_windows(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("quire.eval.text.score_windows", note)
    results = Results(path)
    assert measure_text(tiny.session("int4", results), TOKENS, 64) == first
    assert (computed, results.num_reused) == ([], 6)
    # Another policy is measured, beside native, which it is compared with.
    measure_text(tiny.session("int4 int8", Results(path)), TOKENS, 64)
    assert [len(policies) for policies in computed] == [2]
    # Another text, another window: all anew.
    measure_text(tiny.session("int4", Results(path)), TOKENS[1:], 64)
    measure_text(tiny.session("int4", Results(path)), TOKENS, 32)
    assert [len(policies) for policies in computed[1:]] == [2, 2]
