"""In which format a block is kept: by its age, down to a floor.

A policy is written as a list from the newest blocks to the oldest: `native:16,int8:48,int4` keeps the 16 newest full
blocks of a sequence native, the 48 before them in int8, and all older ones in int4.

    block        0        1 ...                    n - 64 ... n - 17     n - 16 ... n - 1     n
                 first    int4                     int8                  native               tail, not yet full

A block's age is the number of full blocks after it. The first block, to which all queries attend, and the tail are
native always. Pressure may narrow older blocks beyond the policy, down to the floor.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.types import Format

# Names of `--kv-cache-dtype` that say what native KV is to be, beside the policy `native`.
NATIVE_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
# The policies that `--kv-cache-dtype` names.
POLICY_OF_DTYPE = {
    "auto": "native",
    **dict.fromkeys(NATIVE_DTYPES, "native"),
    "int8": "native:1,int8",
    "fp8": "native:1,fp8",
    "k8v4": "native:1,k8v4",
    "int4": "native:1,int4",
    "mixed": "native:1,int8:3,int4",
}


class PrecisionError(Exception):
    """A precision policy, floor or cache dtype that makes no sense; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Tier:
    """Blocks from an age on are kept in this format."""

    fmt: Format
    from_age_blocks: int


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Tiers from the youngest blocks to the oldest, each narrower than the one before; the first is native."""

    tiers: tuple[Tier, ...] = (Tier(Format.NATIVE, 0),)
    floor: Format = Format.NATIVE  # never wider than the last tier

    @property
    def narrowing(self) -> tuple[Tier, ...]:
        """The tiers that blocks are demoted to."""
        return self.tiers[1:]

    @property
    def formats(self) -> list[Format]:
        """Every format that blocks may be in, from the widest to the narrowest."""
        return sorted({self.floor, *(tier.fmt for tier in self.tiers)})

    def format_of(self, block_idx: int, num_full_blocks: int) -> Format:
        """Return the narrowest format that the policy allows for a block of a sequence with so many full ones."""
        age_blocks = num_full_blocks - 1 - block_idx
        if block_idx > 0:
            for tier in reversed(self.tiers):
                if age_blocks >= tier.from_age_blocks:
                    return tier.fmt
        return Format.NATIVE

    def pressed_format_of(self, block_idx: int, num_full_blocks: int) -> Format:
        """Return the narrowest format that pressure may put a block in."""
        return self.floor if 0 < block_idx < num_full_blocks else Format.NATIVE

    def limited_to(self, floor: Format | None) -> "PrecisionPolicy":
        """Return the policy for a request that wants nothing narrower than `floor`; None: it has no wish.

        It uses no other formats than this one: blocks that would be narrower stay in the last tier that is left.
        """
        if floor is None or floor >= self.floor:
            return self
        return PrecisionPolicy(
            tiers=tuple(tier for tier in self.tiers if tier.fmt <= floor),
            floor=max(fmt for fmt in self.formats if fmt <= floor),
        )

    def count_formats(self, first_block_idx: int, end_block_idx: int, num_full_blocks: int) -> list[int]:
        """Return how many of these blocks the policy keeps in each format, by format code."""
        counts = [0] * len(Format)
        older_end = 1  # the first block is native
        for tier in reversed(self.narrowing):
            tier_end = max(older_end, num_full_blocks - tier.from_age_blocks)
            counts[tier.fmt] += max(0, min(tier_end, end_block_idx) - max(older_end, first_block_idx))
            older_end = tier_end
        counts[Format.NATIVE] += end_block_idx - first_block_idx - sum(counts)
        return counts


NATIVE_ONLY = PrecisionPolicy()


@dataclass(slots=True)
class _PolicyReader:
    """Reads one list of tiers."""

    text: str
    tiers: list[Tier] = field(default_factory=list)
    from_age_blocks: int = 0

    def read(self) -> tuple[Tier, ...]:
        items = self.text.split(",")
        for item in items[:-1]:
            name, colon, num_blocks = item.strip().partition(":")
            if not colon:
                raise self._error(f"{name!r} needs a number of blocks, as all but the last format do")
            self._add(name)
            if not (num_blocks.isascii() and num_blocks.isdigit() and int(num_blocks) > 0):
                raise self._error(f"{num_blocks!r} is not a number of blocks, 1 or more")
            self.from_age_blocks += int(num_blocks)
        name, colon, _ = items[-1].strip().partition(":")
        if colon:
            raise self._error("the last format holds all older blocks, so it takes no number")
        self._add(name)
        return tuple(self.tiers)

    def _add(self, name: str) -> None:
        fmt = parse_format(name)
        if not self.tiers and fmt is not Format.NATIVE:
            raise self._error("it must begin with native, in which new blocks are written")
        if self.tiers and fmt <= self.tiers[-1].fmt:
            raise self._error(f"{name} is not narrower than the {name_of(self.tiers[-1].fmt)} before it")
        self.tiers.append(Tier(fmt, self.from_age_blocks))

    def _error(self, reason: str) -> PrecisionError:
        return PrecisionError(f"the precision policy {self.text!r} makes no sense: {reason}")


def parse_format(name: str) -> Format:
    """Return the format of that name; raises PrecisionError."""
    for fmt in Format:
        if name_of(fmt) == name:
            return fmt
    raise PrecisionError(f"{name!r} is not a KV format: there are {', '.join(map(name_of, Format))}")


def parse_policy(text: str, floor: str | None = None) -> PrecisionPolicy:
    """Return the policy that a list like `native:16,int8:48,int4` says; raises PrecisionError.

    `floor` names the narrowest format that pressure may use; None: the narrowest of the list.
    """
    tiers = _PolicyReader(text).read()
    floor_format = tiers[-1].fmt if floor is None else parse_format(floor)
    if floor_format < tiers[-1].fmt:
        raise PrecisionError(
            f"the precision floor {floor} is wider than {name_of(tiers[-1].fmt)}, which the policy {text!r} uses anyway"
        )
    return PrecisionPolicy(tiers, floor_format)


def policy_of_dtype(dtype: str, floor: str | None = None) -> PrecisionPolicy:
    """Return the policy that a `--kv-cache-dtype` names; raises PrecisionError. For `floor` see `parse_policy`."""
    if dtype not in POLICY_OF_DTYPE:
        raise PrecisionError(f"{dtype!r} is not a KV cache dtype: there are {', '.join(POLICY_OF_DTYPE)}")
    return parse_policy(POLICY_OF_DTYPE[dtype], floor)


def name_of(fmt: Format) -> str:
    """Return a format's name, as policies have it."""
    return fmt.name.lower()
