"""What has been measured so far, part by part, in the JSON file: a run that was cut goes on where it was.

A part is one policy's figures on a piece of a task (a window, an item). It is known by all that its figures depend on,
so that another text, model, policy or setting is measured anew, and what was measured under others is kept beside it.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.eval.errors import EvalMistakeError

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Which part it is."""

    task: str
    policy: str  # the list of tiers, since names may come to mean other ones
    unit: str  # which piece of the task
    conditions: str  # digest of what the figures depend on besides


def digest(values: object) -> str:
    """Return a short digest of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Results:
    """Parts that were measured, and the file that holds them."""

    def __init__(self, path: Path | None) -> None:
        """Read what `path` holds; None: nothing is read or written. Raises EvalMistakeError."""
        self._path = path
        self._parts: dict[Part, Any] = {}
        self._conditions: dict[str, Any] = {}
        self.num_reused = 0
        if path is not None:
            self._check_folder(path)
            if path.exists():
                self._read(path)

    def describe(self, conditions: Mapping[str, Any]) -> str:
        """Note down what figures depend on; return its digest for `Part.conditions`."""
        key = digest(conditions)
        self._conditions[key] = dict(conditions)
        return key

    def get(self, part: Part) -> Any:
        """Return a part's result, None where it has not been measured."""
        return self._parts.get(part)

    def missing(self, parts: Sequence[Part]) -> list[Part]:
        """Return those that are still to be measured, and count the others as reused."""
        missing = [part for part in parts if part not in self._parts]
        self.num_reused += len(parts) - len(missing)
        return missing

    def put(self, results: Mapping[Part, Any]) -> None:
        """Take in parts, and write the file. Raises OSError."""
        self._parts |= results
        self.write()

    def write(self, **more: Any) -> None:
        """Write the file, so that it appears whole or not at all; `more` stands before the parts. Raises OSError."""
        if self._path is None:
            return
        parts = [
            {
                "task": part.task,
                "policy": part.policy,
                "unit": part.unit,
                "conditions": part.conditions,
                "result": result,
            }
            for part, result in self._parts.items()
        ]
        value = {"quire_eval": _VERSION, **more, "conditions": self._conditions, "parts": parts}
        staging = self._path.with_name(f".{self._path.name}.part")
        staging.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(staging, self._path)

    def _read(self, path: Path) -> None:
        try:
            value = json.loads(path.read_bytes())
            if value["quire_eval"] != _VERSION:
                raise EvalMistakeError(f"--json: {path} is of another version of quire eval: name a new file")
            self._conditions = dict(value["conditions"])
            for each in value["parts"]:
                part = Part(each["task"], each["policy"], each["unit"], each["conditions"])
                self._parts[part] = each["result"]
        except OSError as error:
            raise EvalMistakeError(f"--json: cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError):
            raise EvalMistakeError(f"--json: {path} is there and was not written by quire eval") from None

    @staticmethod
    def _check_folder(path: Path) -> None:
        """Find out before hours of measuring, not after."""
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise EvalMistakeError(f"--json: cannot write {path}: no such folder, or it is one")
