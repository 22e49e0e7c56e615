"""Multiple-choice items, from the files in which MMLU is published: CSV without a header, and JSON lines.

    What do bees make?,honey,milk,wool,silk,A                                              question, choices, letter
    {"question": "What do bees make?", "choices": ["honey", "milk", "wool", "silk"], "answer": 0}     or its letter

A header line of a CSV file, and further fields of a JSON line such as `subject`, are passed over.
"""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.eval.errors import EvalMistakeError
from quire.eval.files import read_json_lines, read_text

LETTERS = "ABCDEFGHIJ"
_FEWEST_CHOICES = 2


@dataclass(frozen=True, slots=True)
class Item:
    """A question, what may be answered, and which of it is right."""

    question: str
    choices: tuple[str, ...]
    answer_idx: int


def read_items(path: Path, flag: str) -> list[Item]:
    """Return the items of a .csv or .jsonl file. Raises EvalMistakeError that names the line at fault."""
    if path.suffix == ".csv":
        items = _read_csv(path, flag)
    elif path.suffix in (".jsonl", ".json"):
        items = [_item_of_json(value, where) for where, value in read_json_lines(path, flag)]
    else:
        raise EvalMistakeError(f"{flag}: {path} is neither .csv nor .jsonl")
    if not items:
        raise EvalMistakeError(f"{flag}: {path} has no items")
    return items


def _read_csv(path: Path, flag: str) -> list[Item]:
    reader = csv.reader(io.StringIO(read_text(path, flag), newline=""), strict=True)
    items: list[Item] = []
    try:
        for fields in reader:
            is_header = reader.line_num == 1 and bool(fields) and fields[-1].strip().lower() == "answer"
            if not fields or is_header:
                continue
            where = f"{flag}: {path}, line {reader.line_num}"
            question, *choices, answer = fields if len(fields) > 1 else ("", *fields)
            items.append(_checked(question, choices, answer.strip(), where))
    except csv.Error as error:
        raise EvalMistakeError(f"{flag}: {path}, line {reader.line_num}: not CSV: {error}") from None
    return items


def _item_of_json(value: dict[str, Any], where: str) -> Item:
    for name in ("question", "choices", "answer"):
        if name not in value:
            raise EvalMistakeError(f"{where}: no {name}")
    return _checked(value["question"], value["choices"], value["answer"], where)


def _checked(question: object, choices: object, answer: object, where: str) -> Item:
    if not isinstance(question, str) or not question.strip():
        raise EvalMistakeError(f"{where}: the question is no text")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise EvalMistakeError(f"{where}: the choices are not a list of texts")
    if not _FEWEST_CHOICES <= len(choices) <= len(LETTERS):
        raise EvalMistakeError(f"{where}: {len(choices)} choices, not {_FEWEST_CHOICES} to {len(LETTERS)}")
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer.upper() in letters:
        answer = letters.index(answer.upper())
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise EvalMistakeError(
            f"{where}: the answer {answer!r} is none of {', '.join(letters)} or 0 to {len(choices) - 1}"
        )
    return Item(question.strip(), tuple(choice.strip() for choice in choices), answer)
