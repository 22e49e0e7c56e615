"""What was found of each policy, in one line for each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIXED_KL = 0.001  # the most that the policy of the dtype `mixed` may cost


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """A policy's figures; None stands for what was not measured."""

    name: str
    tiers: str
    is_uniform: bool
    sequence_bytes: Mapping[int, int]  # by tokens of the sequence
    native_ratios: Mapping[int, float]  # bytes of native by the policy's, by tokens of the sequence
    pool_blocks: int
    num_tokens: int | None = None
    perplexity: float | None = None
    perplexity_change: float | None = None  # share of native's
    kl: float | None = None  # nats a token
    agreement: float | None = None  # share of tokens
    num_items: int | None = None
    num_right: int | None = None
    num_problems: int | None = None
    num_passed: int | None = None
    bleu: float | None = None  # 0 to 100
    rouge_l: float | None = None  # 0 to 100
    first_token_ms: float | None = None
    tokens_per_second: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def smallest_within(summaries: Sequence[PolicySummary], num_tokens: int, max_kl: float) -> PolicySummary | None:
    """Return the policy with the fewest bytes for a sequence of so many tokens whose KL is within a bound."""
    within = [each for each in summaries if each.kl is not None and each.kl <= max_kl]
    return min(within, key=lambda each: each.sequence_bytes[num_tokens], default=None)
