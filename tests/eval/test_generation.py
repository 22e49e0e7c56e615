"""Greedy continuations: native's are those of `transformers`, and BLEU and ROUGE say how far others stray."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.eval.errors import EvalMistakeError
from quire.eval.generation import cut_prompts, generate, measure_generation, overlap
from quire.eval.results import Results
from scheduler_svc.core.precision import parse_policy
from tests.eval.conftest import BLOCK_SIZE, Tiny

TOKENS = [(11 * idx * idx + 3 * idx + 1) % 97 for idx in range(100)]


def greedy(tiny: Tiny, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(tiny.saved.expected_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_native_continues_as_transformers_does(tiny: Tiny) -> None:
    rows, policy = tiny.rows(), parse_policy("native")
    prompts = [TOKENS[:5], TOKENS[: 2 * BLOCK_SIZE], TOKENS[30:61]]
    generated = generate(rows, [(policy, prompt) for prompt in prompts], 20, lambda _: False, lambda: None)
    assert generated.outputs == [greedy(tiny, prompt, 20) for prompt in prompts]
    assert generated.first_token_ms > 0
    assert generated.tokens_per_second > 0
    assert rows.store.num_used_blocks == 0


def test_continuation_ends_when_it_is_told_to(tiny: Tiny) -> None:
    expected = greedy(tiny, TOKENS[:20], 12)
    last = expected[4]
    ended = generate(
        tiny.rows(), [(parse_policy("native"), TOKENS[:20])], 12, lambda output: output[-1] == last, lambda: None
    )
    assert ended.outputs == [expected[: expected.index(last) + 1]]


def test_policy_changes_continuations(tiny: Tiny) -> None:
    prompts = cut_prompts(TOKENS, 6, 60)
    outputs = {
        policy: generate(
            tiny.rows(), [(parse_policy(policy), prompt) for prompt in prompts], 24, lambda _: False, lambda: None
        ).outputs
        for policy in ("native", "native:1,int4")
    }
    assert outputs["native"] != outputs["native:1,int4"]


def test_prompts_are_spread_over_the_text() -> None:
    assert cut_prompts(range(100), 3, 40) == [range(40), range(30, 70), range(60, 100)]
    assert cut_prompts(range(40), 2, 40) == [range(40), range(40)]
    assert cut_prompts(range(40), 1, 30) == [range(30)]
    with pytest.raises(EvalMistakeError, match=r"^--prompt-tokens 41: the text has 40 tokens$"):
        cut_prompts(range(40), 2, 41)


def test_measured_policies_are_not_measured_again(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompts = tmp_path / "results.json", cut_prompts(TOKENS, 2, 40)
    first = measure_generation(tiny.session("int8", Results(path)), prompts, 4)
    monkeypatch.setattr("quire.eval.generation.generate", lambda *_: pytest.fail("measured again"))
    assert measure_generation(tiny.session("int8", Results(path)), prompts, 4) == first


def test_overlap_of_equal_texts_is_whole_and_of_others_less() -> None:
    native = ["the sea rises twice a day along the coast", "a lock lifts a ship without any engine at all"]
    same = overlap(native, native)
    assert same.bleu == pytest.approx(100)
    assert same.rouge_l == pytest.approx(100)
    close = overlap(["the sea rises twice a day along the shore", native[1]], native)
    far = overlap(["no word in common here", "nothing of it"], native)
    assert 100 > close.bleu > far.bleu
    # ROUGE-L of the first: 8 of 9 words in order.
    assert close.rouge_l == pytest.approx((100 * 8 / 9 + 100) / 2)
    assert far.rouge_l < 10
