"""The load generator against a real cell: completions, chats, and requests that are refused."""

import json
import subprocess
import sys

import pytest

from bench.cell import ROOT, Cell

FEW = ("--num-requests", "4", "--prompt-tokens", "8", "--output-tokens", "4")


def load(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.load", "--url", url, *FEW, *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)


@pytest.mark.parametrize("flags", [("--vocab-size", "49000"), ("--chat",), ("--request-rate", "100")])
def test_figures_of_a_load_are_written(cell: Cell, flags: tuple[str, ...]) -> None:
    result = load(cell.url, "--json-path", "-", *flags)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["num_requests"], figures["num_failed"], figures["num_output_tokens"]) == (4, 0, 16)


def test_refused_requests_are_counted_beside_the_figures_of_the_others(cell: Cell) -> None:
    # Two of the four prompts have a token that the model lacks.
    result = load(cell.url, "--vocab-size", "50000", "--prompt-tokens", "30", "--seed", "1")
    assert result.returncode == 1
    assert "2 more failed" in result.stdout
    assert "status 400" in result.stderr


def test_server_that_refuses_everything_is_one_line(cell: Cell) -> None:
    result = load(cell.url, "--model", "no-such-model")
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "all 4 requests failed" in line
    assert "no-such-model" in line
