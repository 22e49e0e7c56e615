"""Reading what flags name: lines of JSON with their numbers, and the data that comes along."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.eval.errors import EvalMistakeError

DATA_FOLDER = Path(__file__).parent / "data"


def read_text(path: Path, flag: str) -> str:
    """Return what a file holds. Raises EvalMistakeError for one that is missing, unreadable or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalMistakeError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise EvalMistakeError(f"{flag}: {path} is not UTF-8 text") from None


def read_json_lines(path: Path, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for each line that is not empty; `where` names file and line. Raises EvalMistakeError."""
    for line_number, line in enumerate(read_text(path, flag).split("\n"), start=1):
        where = f"{flag}: {path}, line {line_number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise EvalMistakeError(f"{where}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise EvalMistakeError(f"{where}: not a JSON object")
        yield where, value
