"""Answers are picked by the probabilities that `transformers` computes, and shared rows do not change them."""

from pathlib import Path

import pytest
import torch

from quire.eval import choices
from quire.eval.choices import AnswerStyle, check_questions, make_question, measure_choices
from quire.eval.errors import EvalMistakeError
from quire.eval.items import Item
from quire.eval.results import Results
from tests.eval.conftest import Tiny

ITEMS = [
    Item("Which is red?", ("a rose", "grass", "the sea", "ink"), 0),
    Item("2+2?", ("four", "five", "a lot", "22"), 0),
    Item("Who rows?", ("a sailor at sea", "me", "all of us", "no one"), 2),
    Item("Where?", ("here", "there"), 1),
    Item("Where, if not here or there?", ("home", "off"), 0),
]
EXAMPLES = [Item("What is up?", ("the sky", "a pit"), 0), Item("And down?", ("the sky", "a pit"), 1)]


def expected_pick(tiny: Tiny, item: Item, style: AnswerStyle) -> int:
    """Compute each answer by itself, in one pass over all of its text."""
    if style == "text":
        asked = [f"Question: {each.question}\nAnswer:" for each in [*EXAMPLES, item]]
        answers = [list(each.choices) for each in [*EXAMPLES, item]]
    else:
        listed = [
            "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", each.choices, strict=False))
            for each in [*EXAMPLES, item]
        ]
        asked = [f"{each.question}\n{lines}Answer:" for each, lines in zip([*EXAMPLES, item], listed, strict=True)]
        answers = [list("ABCD"[: len(each.choices)]) for each in [*EXAMPLES, item]]
    context = "".join(
        f"{question} {own[each.answer_idx]}\n\n" for question, own, each in zip(asked, answers, EXAMPLES, strict=False)
    )
    context += asked[-1]
    scores = []
    for answer in answers[-1]:
        tokens = tiny.model.codec.encode(f"{context} {answer}")
        log_probs = torch.log_softmax(tiny.saved.expected_logits(tokens).double(), dim=-1)
        begin = len(tiny.model.codec.encode(context))
        total = sum(float(log_probs[idx - 1, tokens[idx]]) for idx in range(begin, len(tokens)))
        scores.append(total / (len(answer) if style == "text" else 1))
    return scores.index(max(scores))


@pytest.mark.parametrize("style", ["text", "letter"])
@pytest.mark.parametrize("batch_rows", [1, 128])
def test_native_picks_are_those_of_transformers(
    tiny: Tiny, style: AnswerStyle, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_BATCH_ROWS", batch_rows)
    picks = measure_choices(tiny.session("int4"), ITEMS, EXAMPLES, style)
    expected = [expected_pick(tiny, item, style) for item in ITEMS]
    assert picks["native"] == expected
    assert len({*expected}) > 1


def test_quantized_blocks_are_read(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[list[float]] = []

    def note(scores: list[float]) -> int:
        scored.append(scores)
        return scores.index(max(scores))

    monkeypatch.setattr(choices, "_likeliest", note)
    measure_choices(tiny.session("int4"), ITEMS[:1], EXAMPLES, "text")
    native, int4 = scored
    assert all(0 < abs(one - other) < 1 for one, other in zip(native, int4, strict=True))
    assert max(abs(one - other) for one, other in zip(native, int4, strict=True)) > 1e-3


def test_without_examples_a_question_is_asked_alone(tiny: Tiny) -> None:
    question = make_question(ITEMS[1], [], "text", tiny.model.codec)
    assert tiny.model.codec.decode(question.token_ids) == "Question: 2+2?\nAnswer:"
    endings = [tiny.model.codec.decode(ending.token_ids) for ending in question.endings]
    assert endings == [" four", " five", " a lot", " 22"]


def test_items_that_were_measured_are_not_measured_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    first = measure_choices(tiny.session("int8", Results(path)), ITEMS, EXAMPLES, "text")
    monkeypatch.setattr(choices, "pick_answers", lambda *_: pytest.fail("measured again"))
    assert measure_choices(tiny.session("int8", Results(path)), ITEMS, EXAMPLES, "text") == first


def test_prompt_longer_than_the_model_is_refused(tiny: Tiny) -> None:
    long = Item("very " * 60 + "long?", ("yes", "no"), 0)
    with pytest.raises(EvalMistakeError, match="and the model was made for 256"):
        check_questions(tiny.model, [long], EXAMPLES, "text")
