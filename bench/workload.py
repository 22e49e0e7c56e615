"""What a load is made of: prompts and output lengths, drawn from a seed, so that every side gets the same."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

# Short common words: most tokenizers give each, with the blank before it, one token.
_TEXT = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an they you were
her all she there would their we him been has when who will more no if out so said what up its about into than them
can only other new some could time these two may then do first any my now such like our over man me even most made
after also did many before must through back years where much your way well down should because each just those people
how too little state good very make world still own see men work long get here between
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: `N`, `LOW:HIGH` (uniform) or `LOW:HIGH:log` (uniform in the logarithm)."""

    low: int
    high: int
    logarithmic: bool = False

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Return the distribution that `text` describes. Raises ValueError."""
        parts = text.split(":")
        if len(parts) > 3 or (len(parts) == 3 and parts[2] != "log"):
            raise ValueError(f"{text!r} is none of N, LOW:HIGH and LOW:HIGH:log")
        low, high = int(parts[0]), int(parts[min(1, len(parts) - 1)])
        if not 1 <= low <= high:
            raise ValueError(f"{text!r}: lengths are 1 or more, the lower one first")
        return cls(low, high, len(parts) == 3)

    def draw(self, rng: random.Random) -> int:
        """Return a length in tokens."""
        if self.logarithmic:
            return round(exp(rng.uniform(log(self.low), log(self.high))))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a load. A prompt is text, or token ids where counts must be exact."""

    prompt: str | list[int]
    num_prompt_tokens: int  # exact for token ids, about right for text
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How to draw jobs. With `vocab_size` prompts are random token ids, without it words."""

    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int = 0  # every prompt begins with that many tokens of one of the prefixes
    num_prefixes: int = 1
    vocab_size: int | None = None
    first_token_id: int = field(default=1000)  # special tokens lie below

    def jobs(self, lengths_seed: int, content_seed: int | None = None) -> list[Job]:
        """Return the jobs. The same lengths with another `content_seed` are the same work with nothing cached."""
        lengths = random.Random(lengths_seed)
        content = random.Random(lengths_seed if content_seed is None else content_seed)
        prefixes = [self._tokens(content, self.shared_prefix_tokens) for _ in range(self.num_prefixes)]
        jobs = []
        for _ in range(self.num_requests):
            num_prompt, num_output = self.prompt_tokens.draw(lengths), self.output_tokens.draw(lengths)
            tokens = [*content.choice(prefixes), *self._tokens(content, num_prompt)]
            jobs.append(Job(self._prompt(tokens), len(tokens), num_output))
        return jobs

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        if self.vocab_size is None:
            return [rng.randrange(len(WORDS)) for _ in range(count)]
        return [rng.randrange(self.first_token_id, self.vocab_size) for _ in range(count)]

    def _prompt(self, tokens: Sequence[int]) -> str | list[int]:
        return " ".join(WORDS[token] for token in tokens) if self.vocab_size is None else list(tokens)
