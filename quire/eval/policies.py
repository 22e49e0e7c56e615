"""Which precision policies are measured: names of KV cache dtypes, lists of formats, and the word `curve`."""

from dataclasses import dataclass

from quire.eval.errors import EvalMistakeError
from scheduler_svc.core.precision import POLICY_OF_DTYPE, PrecisionError, PrecisionPolicy, parse_policy

NATIVE = "native"
CURVE = "curve"
UNIFORM = ("int8", "fp8", "k8v4", "int4")
# What `curve` stands for besides: how many young blocks it takes to make up for narrow old ones.
AGE_POLICIES = (
    "native:8,int8",
    "native:1,int8:15,k8v4",
    "native:8,int8:32,k8v4",
    "native:2,int4",
    "native:4,int4",
    "native:8,int4",
    "native:1,int8:3,int4",
    "native:1,int8:7,int4",
    "native:1,int8:15,int4",
    "native:4,int8:12,int4",
    "native:8,int8:32,int4",
    "native:16,int8:48,int4",
    "native:32,int8:64,int4",
)


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """A policy, how people call it, and the list that says it in full."""

    name: str
    tiers: str  # such as native:16,int8:48,int4
    policy: PrecisionPolicy

    @property
    def is_uniform(self) -> bool:
        """Whether all blocks but the newest and the first are in one format."""
        return all(tier.from_age_blocks <= 1 for tier in self.policy.tiers)


NATIVE_POLICY = NamedPolicy(NATIVE, NATIVE, PrecisionPolicy())


def read_policies(text: str) -> list[NamedPolicy]:
    """Return the policies that words, with blanks between them, name; native, the measure of all, comes first.

    A policy that is named twice is measured once. Raises EvalMistakeError.
    """
    words: list[str] = []
    for word in text.split():
        words += (*UNIFORM, *AGE_POLICIES, "mixed") if word == CURVE else (word,)
    policies = {NATIVE: NATIVE_POLICY}
    for word in words:
        tiers = POLICY_OF_DTYPE.get(word, word)
        try:
            policy = parse_policy(tiers)
        except PrecisionError as error:
            raise EvalMistakeError(f"--policies: {error}") from None
        known = policies.get(tiers)
        is_better_name = known is not None and known.name == tiers and word in POLICY_OF_DTYPE and tiers != NATIVE
        if known is None or is_better_name:
            policies[tiers] = NamedPolicy(word, tiers, policy)
    return list(policies.values())
