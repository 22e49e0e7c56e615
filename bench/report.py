"""Figures from measurements: percentiles, medians with their spread, ratios against what is claimed, tables."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.client import Timing


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, by linear interpolation; 0.0 for none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One load in figures; times in milliseconds."""

    num_requests: int  # that were answered
    num_failed: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float

    @classmethod
    def of(cls, timings: Sequence[Timing], num_failed: int = 0) -> "LoadFigures":
        """Return the figures of a load's timings, of which there is one at least, beside requests that failed.

        Its duration is from the first request to the last token.
        """
        duration_s = max(t.chunk_times_s[-1] for t in timings) - min(t.begin_s for t in timings)
        num_output_tokens = sum(t.num_output_tokens for t in timings)
        ttft = [t.ttft_s for t in timings]
        tpot = [t.tpot_s for t in timings if t.tpot_s is not None]
        itl = [gap for t in timings for gap in t.itl_s]
        return cls(
            num_requests=len(timings),
            num_failed=num_failed,
            duration_s=duration_s,
            num_prompt_tokens=sum(t.num_prompt_tokens for t in timings),
            num_cached_tokens=sum(t.num_cached_tokens for t in timings),
            num_output_tokens=num_output_tokens,
            output_tokens_per_s=num_output_tokens / duration_s,
            ttft_p50_ms=1e3 * percentile(ttft, 0.5),
            ttft_p99_ms=1e3 * percentile(ttft, 0.99),
            tpot_p50_ms=1e3 * percentile(tpot, 0.5),
            tpot_p99_ms=1e3 * percentile(tpot, 0.99),
            itl_p50_ms=1e3 * percentile(itl, 0.5),
            itl_p99_ms=1e3 * percentile(itl, 0.99),
        )

    def as_json(self) -> str:
        """Return the figures as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_table(self) -> str:
        """Return the figures as a table for people."""
        rows = [
            ("requests", f"{self.num_requests} in {self.duration_s:.1f} s, {self.num_failed} more failed"),
            ("prompt tokens", f"{self.num_prompt_tokens}, of these {self.num_cached_tokens} cached"),
            ("output tokens", f"{self.num_output_tokens}"),
            ("output tokens/s", f"{self.output_tokens_per_s:.1f}"),
            ("time to first token", f"p50 {self.ttft_p50_ms:.1f} ms, p99 {self.ttft_p99_ms:.1f} ms"),
            ("time per output token", f"p50 {self.tpot_p50_ms:.2f} ms, p99 {self.tpot_p99_ms:.2f} ms"),
            ("between two chunks", f"p50 {self.itl_p50_ms:.2f} ms, p99 {self.itl_p99_ms:.2f} ms"),
        ]
        return table(rows)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as lines with aligned columns."""
    listed = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in listed) for column in range(len(listed[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed
    )


def spread(values: Sequence[float]) -> str:
    """Return a median with its lowest and highest value."""
    return f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g}, n={len(values)})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim beside what was measured."""

    name: str
    measured: Sequence[float]  # one value a repeat
    limit: float
    limit_is_upper: bool
    unit: str = "x"
    every_time: bool = False  # else the median is what counts

    @property
    def holds(self) -> bool:
        """Whether what was measured is within the limit."""
        values = self.measured if self.every_time else [median(self.measured)]
        return all(value <= self.limit if self.limit_is_upper else value >= self.limit for value in values)

    def __str__(self) -> str:
        """Return one line."""
        sign = "<=" if self.limit_is_upper else ">="
        when = " every time" if self.every_time else ""
        verdict = "holds" if self.holds else "MISSED"
        return f"{self.name}: {spread(self.measured)} {self.unit}, claimed {sign} {self.limit:g}{when}: {verdict}"


def at_most(name: str, measured: Sequence[float], limit: float, unit: str = "x") -> Finding:
    """Return a finding whose claim is an upper limit."""
    return Finding(name, measured, limit, limit_is_upper=True, unit=unit)


def at_least(name: str, measured: Sequence[float], limit: float, unit: str = "x") -> Finding:
    """Return a finding whose claim is a lower limit."""
    return Finding(name, measured, limit, limit_is_upper=False, unit=unit)


def always_at_least(name: str, measured: Sequence[float], limit: float) -> Finding:
    """Return a finding whose claim is a lower limit of every repeat."""
    return Finding(name, measured, limit, limit_is_upper=False, every_time=True)


def never(name: str, measured: Sequence[float], unit: str) -> Finding:
    """Return a finding whose claim is that there are none of these, in no repeat."""
    return Finding(name, measured, 0, limit_is_upper=True, unit=unit, every_time=True)


Say = Callable[[str], None]


def say(line: str) -> None:
    """Print a line at once: measurements take long, and people watch."""
    print(line, flush=True)
