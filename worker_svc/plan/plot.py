"""A plan as a picture: what one sequence takes, and how many fit, over context lengths. Needs matplotlib."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from worker_svc.plan.memory import MemoryPlan
from worker_svc.plan.table import format_name, show_bytes

_SHORTEST_TOKENS = 256
_LONGEST_TOKENS = 131072  # of a shape that comes without a model
_POINTS_PER_DOUBLING = 8


def draw_plan(plan: MemoryPlan, path: Path) -> None:
    """Write the picture to `path`, as PNG whatever its name. Raises OSError."""
    longest = max(plan.shape.max_model_len or _LONGEST_TOKENS, plan.mean_length_tokens)
    lengths = _lengths(min(_SHORTEST_TOKENS, plan.mean_length_tokens), longest)
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for fmt in plan.formats:
        left.plot(lengths, [fmt.sequence_bytes(length) for length in lengths], label=format_name(fmt))
        right.plot(lengths, [fmt.num_sequences(length) for length in lengths], label=format_name(fmt))
    left.axhline(plan.budget.kv_bytes, color="gray", linestyle="--", label="all that is there for KV")
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    right.set_yscale("log")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _label(left, plan, "KV of one sequence")
    _label(right, plan, "sequences that fit")
    figure.suptitle(f"{plan.shape.description}; {show_bytes(plan.budget.kv_bytes)} for KV")
    figure.savefig(path, format="png", dpi=120)


def _lengths(shortest: int, longest: int) -> list[int]:
    """Return lengths in tokens from one to the other, evenly on a logarithmic axis."""
    lengths = []
    exponent = 0
    while (length := round(shortest * 2 ** (exponent / _POINTS_PER_DOUBLING))) < longest:
        lengths.append(length)
        exponent += 1
    return [*lengths, longest]


def _label(axes: Axes, plan: MemoryPlan, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.axvline(plan.mean_length_tokens, color="gray", linestyle=":", label="--mean-length")
    axes.set_xlabel("context, tokens")
    axes.set_title(title)
    axes.grid(True, alpha=0.3)
    axes.legend()
