"""What all tasks share: the model, the policies, the figures so far, and how progress is shown."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from kernels.formats import RECIPES
from quire.eval.loading import LoadedModel
from quire.eval.paged import PagedRows
from quire.eval.policies import NamedPolicy
from quire.eval.results import Part, Results

_TERMINAL_SECONDS, _LOG_SECONDS = 0.5, 60.0  # between two states of a progress bar


@dataclass(frozen=True, slots=True)
class Session:
    """A run of `quire eval`."""

    model: LoadedModel
    block_size: int  # tokens
    policies: Sequence[NamedPolicy]  # native first
    results: Results

    @property
    def native(self) -> NamedPolicy:
        """What the others are compared with."""
        return self.policies[0]

    def make_rows(self) -> PagedRows:
        """Return an arena without rows, its kernels compiled."""
        rows = PagedRows(self.model, self.block_size)
        rows.warm_up()
        return rows

    def conditions(self, **values: Any) -> str:
        """Note down what a task's figures depend on, besides policy and unit; return its digest."""
        return self.results.describe(
            {
                "model_fingerprint": self.model.fingerprint,
                "dtype": str(self.model.decoder.dtype).removeprefix("torch."),
                "device": self.model.decoder.device.type,
                "block_size": self.block_size,
                "recipe_versions": {fmt.name.lower(): recipe.version for fmt, recipe in RECIPES.items()},
                **values,
            }
        )

    def missing(self, task: str, unit: str, conditions: str) -> list[NamedPolicy]:
        """Return the policies for which a piece of a task is still to be measured."""
        parts = {Part(task, policy.tiers, unit, conditions): policy for policy in self.policies}
        return [parts[part] for part in self.results.missing(list(parts))]


def progress_bar(title: str, total: int, unit: str) -> "tqdm[Any]":
    """Return a bar on standard error: often anew on a terminal, once a minute in a log."""
    interval = _TERMINAL_SECONDS if sys.stderr.isatty() else _LOG_SECONDS
    return tqdm(total=total, desc=title, unit=unit, mininterval=interval, smoothing=0.1, dynamic_ncols=True)
