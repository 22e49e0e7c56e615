"""Multiple-choice items in both layouts of MMLU, and one line for what is wrong with them."""

from pathlib import Path

import pytest

from quire.eval.errors import EvalMistakeError
from quire.eval.files import DATA_FOLDER
from quire.eval.items import Item, read_items

BEES = Item("What do bees make?", ("honey", "milk, fresh", "wool", "silk"), 0)
SUM = Item('What is "2 + 2"?', ("3", "5", "4", "22"), 2)


def read(tmp_path: Path, name: str, text: str) -> list[Item]:
    path = tmp_path / name
    path.write_text(text)
    return read_items(path, "--items")


@pytest.mark.parametrize("header", ["", "question,A,B,C,D,answer\n"])
def test_csv(tmp_path: Path, header: str) -> None:
    lines = 'What do bees make?,honey,"milk, fresh",wool,silk,A\n"What is ""2 + 2""?",3,5,4,22,C\n'
    assert read(tmp_path, "items.csv", header + lines) == [BEES, SUM]


def test_json_lines(tmp_path: Path) -> None:
    lines = (
        '{"question": "What do bees make?", "choices": ["honey", "milk, fresh", "wool", "silk"], "answer": 0}\n\n'
        '{"question": "What is \\"2 + 2\\"?", "subject": "sums", "choices": ["3", "5", "4", "22"], "answer": "C"}\n'
    )
    assert read(tmp_path, "items.jsonl", lines) == [BEES, SUM]


GOOD = '{"question": "Q?", "choices": ["a", "b"], "answer": 0}\n'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("items.jsonl", GOOD + "{", "line 2: not JSON"),
        ("items.jsonl", GOOD + "[]", "line 2: not a JSON object"),
        ("items.jsonl", GOOD + '{"question": "Q?", "choices": ["a", "b"]}', "line 2: no answer"),
        ("items.jsonl", '{"question": "", "choices": ["a", "b"], "answer": 0}', "line 1: the question is no text"),
        ("items.jsonl", '{"question": "Q?", "choices": "ab", "answer": 0}', "line 1: the choices are not a list"),
        ("items.jsonl", '{"question": "Q?", "choices": ["a"], "answer": 0}', "line 1: 1 choices, not 2 to 10"),
        ("items.jsonl", '{"question": "Q?", "choices": ["a", "b"], "answer": 2}', "line 1: the answer 2 is none of"),
        ("items.jsonl", '{"question": "Q?", "choices": ["a", "b"], "answer": "C"}', "the answer 'C' is none of A, B"),
        ("items.jsonl", '{"question": "Q?", "choices": ["a", "b"], "answer": true}', "the answer True is none of"),
        ("items.csv", "Q?,a,b,c,d,A\nQ?,a,b,c,d,E\n", "line 2: the answer 'E' is none of A, B, C, D"),
        ("items.csv", "Q?,a,b,c,d,A\nQ?\n", "line 2: the question is no text"),
        ("items.csv", 'Q?,a,b,c,d,A\n"Q?,a,b\n', "line 2: not CSV"),
        ("items.csv", "\n", "has no items"),
        ("items.txt", "", "neither .csv nor .jsonl"),
    ],
)
def test_mistake_is_named_with_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    with pytest.raises(EvalMistakeError, match=r"^--items: .*items\.") as caught:
        read(tmp_path, name, text)
    assert words in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalMistakeError, match=r"^--items: cannot read .*none\.csv: No such file"):
        read_items(tmp_path / "none.csv", "--items")


def test_items_that_come_along() -> None:
    items = read_items(DATA_FOLDER / "items.jsonl", "--items")
    examples = read_items(DATA_FOLDER / "examples.jsonl", "--examples")
    assert len(items) == len({item.question for item in items}) == 50
    assert not {item.question for item in items} & {item.question for item in examples}
    assert all(len({*item.choices}) == 4 for item in [*items, *examples])
    # Who always answers alike is right no more often than by chance.
    answers = [item.answer_idx for item in items]
    assert sorted(answers.count(idx) for idx in range(4)) == [12, 12, 13, 13]
