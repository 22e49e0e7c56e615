"""KL over bytes as a picture: what each policy costs in quality for what it saves. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quire.eval.sizes import LENGTHS_TOKENS
from quire.eval.summary import MIXED_KL, PolicySummary

_MIB = 1 << 20


def draw_curve(summaries: Sequence[PolicySummary], title: str, path: Path) -> None:
    """Write the picture to `path`, as PNG whatever its name: a panel for each length. Raises OSError."""
    figure = Figure(figsize=(8 * len(LENGTHS_TOKENS), 7), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS_TOKENS), sharey=True)
    for axes, num_tokens in zip(panels, LENGTHS_TOKENS, strict=True):
        # Native, with a KL of 0, has no place on a logarithmic axis: it is a line at its bytes.
        measured = [each for each in summaries if each.kl and each.kl > 0]
        _draw_series(axes, [each for each in measured if each.is_uniform], num_tokens, "o", "one format")
        _draw_series(axes, [each for each in measured if not each.is_uniform], num_tokens, "s", "by age")
        axes.axvline(summaries[0].sequence_bytes[num_tokens] / _MIB, color="gray", linestyle=":", label="native")
        axes.axhline(MIXED_KL, color="gray", linestyle="--", label=f"KL {MIXED_KL}")
        axes.set_yscale("log")
        axes.set_xlabel(f"KV of a sequence of {num_tokens:,} tokens, MiB")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("KL from native, nats a token")
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _draw_series(axes: Axes, series: Sequence[PolicySummary], num_tokens: int, marker: str, label: str) -> None:
    places = [(each.sequence_bytes[num_tokens] / _MIB, each.kl or 0.0) for each in series]
    axes.scatter([place[0] for place in places], [place[1] for place in places], marker=marker, label=label)
    for each, place in zip(series, places, strict=True):
        axes.annotate(each.name, place, textcoords="offset points", xytext=(5, 4), fontsize=8)
