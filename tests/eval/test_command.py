"""`quire eval` from the outside: a table, JSON, a plot, what is kept for the next run, and one line for mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from quire.eval import __main__ as command
from quire.eval import run
from quire.eval.__main__ import main
from quire.eval.files import DATA_FOLDER
from quire.eval.loading import load_model
from tests.eval.conftest import Tiny, make_tiny

ROOT = Path(__file__).resolve().parents[2]
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def small_flags(tiny: Tiny, folder: Path) -> list[str]:
    """Return flags of a run over all tasks that takes a second."""
    text, items, problems = folder / "text.txt", folder / "items.csv", folder / "problems.jsonl"
    text.write_text("A lock lifts a ship. " * 12)
    items.write_text("Is it so?,yes,no,maybe,never,A\nOr so?,no,yes,never,maybe,B\n")
    problem = {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): assert f()\n"}
    problems.write_text(json.dumps(problem) + "\n")
    values = {
        "--model": tiny.saved.folder,
        "--policies": "int8 native:2,int8:3,int4",
        "--block-size": 8,
        "--text": text,
        "--window-tokens": 128,
        "--items": items,
        "--examples": items,
        "--num-examples": 1,
        "--num-prompts": 2,
        "--prompt-tokens": 50,
        "--output-tokens": 8,
        "--humaneval": problems,
        "--humaneval-tokens": 8,
        "--json": folder / "results.json",
        "--plot": folder / "plot.png",
    }
    return [str(word) for pair in values.items() for word in pair]


def quire_eval(*arguments: str) -> subprocess.CompletedProcess[str]:
    command_line = [sys.executable, "-m", "quire", "eval", *arguments]
    return subprocess.run(command_line, env={**os.environ}, capture_output=True, text=True, check=False, cwd=ROOT)


def test_all_tasks_give_a_table_json_and_a_plot_and_run_once(tiny: Tiny, tmp_path: Path) -> None:
    flags = small_flags(tiny, tmp_path)
    result = quire_eval(*flags)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for title in ("perplexity", "KL", "top token", "items", "pass@1", "BLEU", "ROUGE-L", "tokens/s", "MiB at 8,000"):
        assert title in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["native", "int8", "native:2,int8:3,int4"]
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_MAGIC)

    value = json.loads((tmp_path / "results.json").read_text())
    native, int8, by_age = value["summary"]
    assert (native["kl"], native["num_items"], native["num_problems"]) == (0.0, 2, 1)
    assert native["bleu"] == pytest.approx(100)
    assert native["rouge_l"] == pytest.approx(100)
    assert 0 < int8["kl"] < by_age["kl"]
    assert native["sequence_bytes"]["8000"] > int8["sequence_bytes"]["8000"] > by_age["sequence_bytes"]["8000"]

    again = quire_eval(*flags)
    assert again.returncode == 0, again.stderr
    assert again.stdout == result.stdout  # times too: nothing was run
    assert f"{len(value['parts'])} parts were in {tmp_path / 'results.json'} already" in again.stderr
    assert json.loads((tmp_path / "results.json").read_text()) == value


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policies", "int5"], "--policies: "),
        (["--policies", "native:4,int8,int4"], "--policies: the precision policy 'native:4,int8,int4' makes no sense"),
        (["--tasks", "text poetry"], "--tasks: poetry is none of text, choices, generation, humaneval"),
        (["--tasks", "humaneval"], "needs --humaneval"),
        (["--text", "/no/such.txt"], "--text: cannot read /no/such.txt: No such file or directory"),
        (["--items", "/no/such.csv"], "--items: cannot read /no/such.csv: No such file or directory"),
        (["--humaneval", "/no/such.jsonl"], "--humaneval: cannot read /no/such.jsonl"),
        (["--json", "/no/such/folder.json"], "--json: cannot write /no/such/folder.json"),
        (["--plot", "/no/such/plot.png"], "--plot: cannot write /no/such/plot.png: no such folder"),
        (["--plot", "plot.png", "--tasks", "choices"], "--plot shows KL"),
        (["--window-tokens", "4"], "--window-tokens: "),
        (["--device", "tpu"], "--device: tpu is none of"),
        (["--block-size", "7"], "--block-size: 7 is none of 8, 16, 32"),
    ],
)
def test_mistake_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("quire eval: ")
    assert words in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_window_longer_than_the_model_is_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tiny.saved.folder), "--tasks", "text", "--window-tokens", "300"]) == 2
    assert "--window-tokens: 300 tokens, and the model was made for 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt-tokens", "500"], "--prompt-tokens 500: the text has"),
        (["--output-tokens", "250"], "--prompt-tokens and --output-tokens: 300 tokens"),
        (["--humaneval-tokens", "250"], "--humaneval with --humaneval-tokens: "),
        (["--num-examples", "9"], "--items with --examples: "),
        (["--text", "empty.txt", "--tasks", "text"], "--text: the text has 0 tokens"),
    ],
)
def test_mistake_is_found_before_anything_is_measured(
    flags: list[str],
    words: str,
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = small_flags(tiny, tmp_path)
    (tmp_path / "empty.txt").touch()
    items = tmp_path / "items.csv"
    items.write_text(items.read_text() * 9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "measure_text", lambda *_: pytest.fail("measured"))
    assert main([*usual, *flags]) == 2
    assert words in capsys.readouterr().err


def test_prompts_begin_with_what_the_tokenizer_puts_before_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "model").mkdir()
    tiny = make_tiny("llama-tied", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<unk> $0", special_tokens=[("<unk>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    asked: list[list[int]] = []

    def note(_session: object, prompts: list[list[int]], _max_tokens: int) -> dict[str, object]:
        asked.extend(prompts)
        return {}

    monkeypatch.setattr(run, "measure_generation", note)
    assert main([*small_flags(tiny, tmp_path), "--tasks", "text generation"]) == 0
    assert [prompt[0] for prompt in asked] == [0, 0]
    assert [len(prompt) for prompt in asked] == [51, 51]


def test_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "/no/such", "--tasks", "text"]) == 1
    assert capsys.readouterr().err == "quire eval: model folder not found: /no/such\n"


@pytest.mark.parametrize("content", ["{", "[]", '{"plan": 1}', '{"quire_eval": 2, "conditions": {}, "parts": [1]}'])
def test_file_of_another_program_is_not_overwritten(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert main(["--json", str(path)]) == 2
    assert "was not written by quire eval" in capsys.readouterr().err
    assert path.read_text() == content


def test_plot_without_its_library_says_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PLOT_PACKAGE", "no_such_package_here")
    assert main(["--plot", "plot.png"]) == 2
    assert "pip install 'quire[eval]'" in capsys.readouterr().err


def test_text_that_comes_along_is_long_enough_for_the_bundled_model() -> None:
    codec = load_model("bundled", "bfloat16", "cpu", print).codec
    text = (DATA_FOLDER / "text.txt").read_text()
    assert len(codec.encode(text)) > 8192
    paragraphs = [line for line in text.splitlines() if line]
    assert len({*paragraphs}) == len(paragraphs)
