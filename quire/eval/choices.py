"""Accuracy on multiple-choice items: the answer to which the model gives the highest probability counts as its own.

Solved examples come before each question, so that its keys are read from blocks that the policy has narrowed. What is
compared is, by `--answers`:

    text     log P(text of the choice | examples, question) / characters of the text; choices are not listed
    letter   log P(letter | examples, question, listed choices), which is how MMLU is scored; small models guess there

Rows share what they have in common: the examples are computed once for each policy, a question once for its answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from quire.eval.items import LETTERS, Item
from quire.eval.loading import LoadedModel, TextCodec, check_length
from quire.eval.paged import PagedRows, Row
from quire.eval.results import Part, digest
from quire.eval.session import Session, progress_bar

AnswerStyle = Literal["text", "letter"]

_TASK = "choices"
_BATCH_ROWS = 128


@dataclass(frozen=True, slots=True)
class Ending:
    """What an answer adds to a question: tokens, and how long it is for the score."""

    token_ids: list[int]
    length: int  # characters, or 1


@dataclass(frozen=True, slots=True)
class Question:
    """An item as tokens: `token_ids` is what all its endings begin with."""

    token_ids: list[int]  # one at least
    endings: list[Ending]
    answer_idx: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return len(self.token_ids) + max(len(ending.token_ids) for ending in self.endings)


def make_question(item: Item, examples: Sequence[Item], style: AnswerStyle, codec: TextCodec) -> Question:
    """Return an item with its examples before it, as tokens."""
    solved = [f"{_ask(example, style)} {_answers(example, style)[example.answer_idx]}\n\n" for example in examples]
    context = "".join(solved) + _ask(item, style)
    answers = _answers(item, style)
    texts = [[*codec.prefix, *codec.encode(f"{context} {answer}")] for answer in answers]
    # A tokenizer may join the question's end and an answer's begin: an ending is what comes after the common part.
    num_shared = min(_num_common(text, [*codec.prefix, *codec.encode(context)]) for text in texts)
    endings = [
        Ending(text[num_shared:], len(answer) if style == "text" else 1)
        for text, answer in zip(texts, answers, strict=True)
    ]
    return Question(texts[0][:num_shared], endings, item.answer_idx)


def check_questions(model: LoadedModel, items: Sequence[Item], examples: Sequence[Item], style: AnswerStyle) -> None:
    """Raise EvalMistakeError where an item with its examples outgrows the model."""
    num_tokens = max(make_question(item, examples, style, model.codec).num_tokens for item in items)
    check_length(model, num_tokens, "--items with --examples")


def measure_choices(
    session: Session, items: Sequence[Item], examples: Sequence[Item], style: AnswerStyle
) -> dict[str, list[int]]:
    """Return for each policy, by its tiers, the choice it makes for each item."""
    questions = [make_question(item, examples, style, session.model.codec) for item in items]
    conditions = session.conditions(questions=digest([asdict(each) for each in questions]), answers=style)
    units = [f"item {item_idx}" for item_idx in range(len(items))]
    due = [session.missing(_TASK, unit, conditions) for unit in units]
    policies = list({policy.tiers: policy for missing in due for policy in missing}.values())
    due_idxs = [item_idx for item_idx, missing in enumerate(due) if missing]
    if due_idxs:
        rows = session.make_rows()
        bases = [rows.start(policy.policy) for policy in policies]
        num_shared = min(_num_common(questions[0].token_ids, each.token_ids[:-1]) for each in questions)
        batch_items = max(1, _BATCH_ROWS // (len(policies) * max(len(item.choices) for item in items)))
        with progress_bar(f"choices, {len(policies)} policies", len(due_idxs), "items") as bar:
            for _ in rows.run([(base, questions[0].token_ids[:num_shared]) for base in bases]):
                bar.refresh()
            for begin in range(0, len(due_idxs), batch_items):
                batch = due_idxs[begin : begin + batch_items]
                picks = pick_answers(rows, bases, num_shared, [questions[idx] for idx in batch])
                bar.update(len(batch))
                session.results.put(
                    {
                        Part(_TASK, policy.tiers, units[idx], conditions): pick
                        for policy, picked in zip(policies, picks, strict=True)
                        for idx, pick in zip(batch, picked, strict=True)
                    }
                )
    return {
        policy.tiers: [session.results.get(Part(_TASK, policy.tiers, unit, conditions)) for unit in units]
        for policy in session.policies
    }


def pick_answers(
    rows: PagedRows, bases: Sequence[Row], num_shared: int, questions: Sequence[Question]
) -> list[list[int]]:
    """Return for each base, a row that has computed `num_shared` tokens, the likeliest ending of each question."""
    asked = [(rows.fork(base), question) for base in bases for question in questions]
    # The last token is left for the endings: what follows it is their first token.
    for _ in rows.run([(row, question.token_ids[num_shared:-1]) for row, question in asked]):
        pass
    forks = [(rows.fork(row), question, ending) for row, question in asked for ending in question.endings]
    scores = _score_endings(rows, forks)
    rows.release([row for row, _ in asked] + [row for row, _, _ in forks])
    picks = [_likeliest([next(scores) for _ in question.endings]) for _, question in asked]
    return [picks[begin : begin + len(questions)] for begin in range(0, len(picks), len(questions))]


def _score_endings(rows: PagedRows, forks: Sequence[tuple[Row, Question, Ending]]) -> Iterator[float]:
    """Yield each ending's log probability, nats, by its length."""
    sums = [0.0] * len(forks)
    begins = [0] * len(forks)
    feeds = [(row, [question.token_ids[-1], *ending.token_ids[:-1]]) for row, question, ending in forks]
    for hidden in rows.run(feeds):
        log_probs = torch.log_softmax(rows.logits(torch.cat(hidden)), dim=-1)
        for fork_idx, chunk in enumerate(torch.split_with_sizes(log_probs, [len(each) for each in hidden])):
            targets = forks[fork_idx][2].token_ids[begins[fork_idx] :][: len(chunk)]
            begins[fork_idx] += len(chunk)
            sums[fork_idx] += float(chunk[range(len(targets)), targets].double().sum())
    return iter([total / ending.length for total, (_, _, ending) in zip(sums, forks, strict=True)])


def _likeliest(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((idx for idx, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _ask(item: Item, style: AnswerStyle) -> str:
    """Return a question up to where its answer is to follow."""
    if style == "text":
        return f"Question: {item.question}\nAnswer:"
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, item.choices, strict=False))
    return f"{item.question}\n{listed}Answer:"


def _answers(item: Item, style: AnswerStyle) -> Sequence[str]:
    """Return what may follow."""
    return item.choices if style == "text" else LETTERS[: len(item.choices)]
