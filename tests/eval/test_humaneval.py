"""HumanEval's problems: what is asked, what of the answer is run, and what counts as passed."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.eval import humaneval
from quire.eval.errors import EvalMistakeError
from quire.eval.humaneval import Problem, cut_completion, measure_humaneval, read_problems
from quire.eval.results import Results
from quire.eval.sandbox import Outcome, Sandbox
from tests.eval.conftest import Tiny

ADD: dict[str, Any] = {
    "task_id": "Test/0",
    "prompt": 'def add(a: int, b: int) -> int:\n    """Add two numbers."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
}


@pytest.fixture
def problems(tmp_path: Path) -> list[Problem]:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(ADD) + "\n" + json.dumps({**ADD, "task_id": "Test/1"}) + "\n")
    return read_problems(path, "--humaneval")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox.open(cpu_seconds=5, memory_bytes=1 << 28)


def test_canonical_solution_passes_and_another_fails(problems: list[Problem], sandbox: Sandbox) -> None:
    assert sandbox.run(problems[0].program(ADD["canonical_solution"])) is Outcome.PASSED
    assert sandbox.run(problems[0].program("    return a - b\n")) is Outcome.FAILED
    # An answer that ends the program before its tests begin has not passed them.
    assert sandbox.run(problems[0].program("    return a - b\nraise SystemExit(0)\n")) is Outcome.FAILED


@pytest.mark.parametrize("rest", ["\ndef g():\n", "\nclass A:\n", "\nprint(add(1, 2))", "\n# done", "\nif __name__"])
def test_completion_ends_with_the_function(rest: str) -> None:
    body = "    if a:\n        # comment\n        return a\n\n    return b"
    assert cut_completion(body + rest) == body
    assert cut_completion(body) == body


def test_each_policy_answers_each_problem_and_is_not_asked_twice(
    tiny: Tiny, problems: list[Problem], sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    outcomes = measure_humaneval(tiny.session("int4", Results(path)), problems, 16, sandbox)
    # A random model writes no program.
    assert outcomes == {policy: [Outcome.FAILED] * 2 for policy in ("native", "native:1,int4")}
    monkeypatch.setattr(humaneval, "generate", lambda *_: pytest.fail("measured again"))
    assert measure_humaneval(tiny.session("int4", Results(path)), problems, 16, sandbox) == outcomes


def test_completion_of_the_model_is_what_is_run(
    tiny: Tiny, problems: list[Problem], sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    solution = tiny.model.codec.encode(ADD["canonical_solution"] + "\nprint(add(1, 2))\nassert False\n")

    class Generated:
        outputs = (solution, solution)

    monkeypatch.setattr(humaneval, "generate", lambda *_: Generated)
    assert measure_humaneval(tiny.session("native"), problems, 16, sandbox) == {"native": [Outcome.PASSED] * 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(ADD) + "\n{", "line 2: not JSON"),
        (json.dumps({**ADD, "test": None}), "line 1: no test, or it is no text"),
        (json.dumps({name: ADD[name] for name in ("task_id", "prompt", "test")}), "line 1: no entry_point"),
        ("", "has no problems"),
    ],
)
def test_mistake_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(EvalMistakeError, match=words):
        read_problems(path, "--humaneval")
