"""Few cases that still show every pair of values together: most bugs need no more than two factors to appear."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_TRIES = 30  # random cases of which the best is kept


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return cases, one value of each factor each, such that every two values of two factors meet in one of them."""
    source, names = random.Random(seed), list(factors)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    cases = []
    while open_pairs:
        a, i, b, j = min(open_pairs)
        tries = [
            {name: source.randrange(len(values)) for name, values in factors.items()} | {a: i, b: j}
            for _ in range(_TRIES)
        ]
        best = max(tries, key=lambda case: len(open_pairs & _pairs(case)))
        open_pairs -= _pairs(best)
        cases.append({name: factors[name][idx] for name, idx in best.items()})
    return cases


def _pairs(case: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(case, 2)}
