"""The summary as text: a line for each policy, a column for each figure that was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.eval.sizes import LENGTHS_TOKENS
from quire.eval.summary import MIXED_KL, PolicySummary, smallest_within

_GAP = "  "
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Column:
    """A figure's title, and how it is shown; None where a policy has none."""

    title: str
    show: Callable[[PolicySummary], str | None]


def _column(title: str, spec: str, get: Callable[[PolicySummary], float | None]) -> Column:
    def show(summary: PolicySummary) -> str | None:
        value = get(summary)
        return None if value is None else format(value, spec)

    return Column(title, show)


def _share(numerator: int | None, denominator: int | None) -> str | None:
    return None if numerator is None else f"{numerator}/{denominator}"


def _bytes_column(num_tokens: int) -> Column:
    def show(summary: PolicySummary) -> str:
        mib = summary.sequence_bytes[num_tokens] / _MIB
        return f"{mib:.2f} ({summary.native_ratios[num_tokens]:.2f} x)"

    return Column(f"MiB at {num_tokens:,}", show)


_COLUMNS = (
    Column("policy", lambda each: each.name),
    _column("perplexity", ".4f", lambda each: each.perplexity),
    _column("change", "+.3%", lambda each: each.perplexity_change),
    _column("KL", ".6f", lambda each: each.kl),
    _column("top token", ".2%", lambda each: each.agreement),
    Column("items", lambda each: _share(each.num_right, each.num_items)),
    Column("pass@1", lambda each: _share(each.num_passed, each.num_problems)),
    _column("BLEU", ".1f", lambda each: each.bleu),
    _column("ROUGE-L", ".1f", lambda each: each.rouge_l),
    _column("first token, ms", ",.0f", lambda each: each.first_token_ms),
    _column("tokens/s", ".1f", lambda each: each.tokens_per_second),
    *(_bytes_column(num_tokens) for num_tokens in LENGTHS_TOKENS),
    _column("blocks in the pool", ",d", lambda each: each.pool_blocks),
)
_NOTES = {
    "KL": "KL: of native's predictions from the policy's, nats a token. change: of perplexity. top token: predictions "
    "with native's most likely token.",
    "BLEU": "BLEU, ROUGE-L: greedy continuations against native's, 0 to 100.",
    "tokens/s": "first token, tokens/s: of all prompts as one batch, prompts in chunks of one block.",
    "blocks in the pool": "MiB at N: KV of a sequence of N tokens, and how many times as much it is in native blocks. "
    "blocks in the pool: of sequences of 2,048 tokens.",
}


def to_table(summaries: Sequence[PolicySummary]) -> str:
    """Return the table and what its columns mean."""
    columns = [column for column in _COLUMNS if any(column.show(each) is not None for each in summaries)]
    titles = [column.title for column in columns]
    cells = [[column.show(each) or "-" for column in columns] for each in summaries]
    notes = [note for title, note in _NOTES.items() if title in titles]
    return "\n".join([*_align([titles, *cells]), "", *notes, *_tell_smallest(summaries)])


def _tell_smallest(summaries: Sequence[PolicySummary]) -> list[str]:
    """Return which policy is the smallest at the KL that `mixed` may have, for each length."""
    best = {num_tokens: smallest_within(summaries, num_tokens, MIXED_KL) for num_tokens in LENGTHS_TOKENS}
    return [
        f"Fewest bytes at {num_tokens:,} tokens with KL up to {MIXED_KL}: {each.tiers}"
        for num_tokens, each in best.items()
        if each is not None
    ]


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append(_GAP.join(cells))
    return lines
