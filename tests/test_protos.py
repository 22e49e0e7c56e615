"""The wire's definition says of every field what it is: for whoever writes another gateway or worker."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "protos"
FIELD = re.compile(r"\s+(?:[\w.<>, ]+ )?(\w+) = \d+;(.*)")  # of a message, or a value of an enum


def uncommented(lines: list[str]) -> list[str]:
    """The names of the fields with a comment neither behind them nor above them."""
    return [
        found.group(1)
        for above, line in zip(["", *lines], lines, strict=False)
        if (found := FIELD.fullmatch(line)) and "//" not in found.group(2) and not above.lstrip().startswith("//")
    ]


@pytest.mark.parametrize("name", ["common", "scheduler", "worker"])
def test_every_field_is_commented(name: str) -> None:
    lines = (FOLDER / f"{name}.proto").read_text().splitlines()
    assert sum(FIELD.fullmatch(line) is not None for line in lines) > 20
    assert uncommented(lines) == []


def test_field_without_a_comment_is_found() -> None:
    assert uncommented(["  // of a", "  uint32 a = 1;", "  map<int32, uint64> b = 2;", "  bool c = 3;  // of c"]) == [
        "b"
    ]
