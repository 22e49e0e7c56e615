"""Greedy continuations under a policy: how fast they come, and how far they stray from native's.

Prompts are computed in chunks of one block, so that they are read as decodes would read them; a server's larger chunks
are faster. All prompts are rows of the same steps: the time to first token is that of the last of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch

from quire.eval.errors import EvalMistakeError
from quire.eval.paged import PagedRows
from quire.eval.results import Part, digest
from quire.eval.session import Session, progress_bar
from scheduler_svc.core.precision import PrecisionPolicy

OVERLAP_PACKAGES = ("sacrebleu", "rouge_score")
_TASK = "generation"
_UNIT = "all prompts"


@dataclass(frozen=True, slots=True)
class Generated:
    """Continuations of prompts, and their speed."""

    outputs: list[list[int]]  # token ids, without what ends a sequence
    first_token_ms: float  # from the begin to the first token of all rows
    tokens_per_second: float  # of all rows together, after their first tokens


@dataclass(frozen=True, slots=True)
class Overlap:
    """How alike continuations are to native's, 0 to 100: runs of words (BLEU), longest common subsequence (ROUGE-L)."""

    bleu: float
    rouge_l: float


def cut_prompts(token_ids: Sequence[int], num_prompts: int, prompt_tokens: int) -> list[Sequence[int]]:
    """Return pieces of a text, evenly spread; they overlap where it is short. Raises EvalMistakeError."""
    room = len(token_ids) - prompt_tokens
    if room < 0:
        raise EvalMistakeError(f"--prompt-tokens {prompt_tokens}: the text has {len(token_ids)} tokens")
    begins = [room * idx // max(1, num_prompts - 1) for idx in range(num_prompts)]
    return [token_ids[begin : begin + prompt_tokens] for begin in begins]


def generate(
    rows: PagedRows,
    prompts: Sequence[tuple[PrecisionPolicy, Sequence[int]]],
    max_tokens: int,
    ends: Callable[[Sequence[int]], bool],
    on_step: Callable[[], object],
) -> Generated:
    """Continue prompts, each under its policy, with the likeliest tokens (the lowest id among equals).

    A continuation ends at `max_tokens`, or when `ends` says so of its tokens so far. `on_step` is called after each
    step.
    """
    begin = time.perf_counter()
    started = [rows.start(policy) for policy, _ in prompts]
    last_hidden: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    for hidden in rows.run([(row, prompt) for row, (_, prompt) in zip(started, prompts, strict=True)]):
        last_hidden = [new[-1] if len(new) else old for new, old in zip(hidden, last_hidden, strict=True)]
        on_step()
    outputs = [[token] for token in _likeliest(rows, torch.stack(last_hidden))]
    first = time.perf_counter()
    num_decoded = 0
    alive = [idx for idx, output in enumerate(outputs) if not ends(output)]
    for _ in range(max_tokens - 1):
        if not alive:
            break
        hidden_rows = rows.step([(started[idx], outputs[idx][-1:]) for idx in alive])
        for idx, token in zip(alive, _likeliest(rows, hidden_rows), strict=True):
            outputs[idx].append(token)
        num_decoded += len(alive)
        alive = [idx for idx in alive if not ends(outputs[idx])]
        on_step()
    end = time.perf_counter()
    rows.release(started)
    return Generated(outputs, 1000 * (first - begin), num_decoded / (end - first) if num_decoded else 0.0)


def measure_generation(session: Session, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Generated]:
    """Return each policy's continuations of the prompts, by its tiers."""
    eos_token_ids = frozenset(session.model.config.eos_token_ids)
    conditions = session.conditions(
        prompts=digest([list(prompt) for prompt in prompts]), output_tokens=max_tokens, threads=torch.get_num_threads()
    )
    num_steps = -(-len(prompts[0]) // session.block_size) + max_tokens - 1
    for policy in session.missing(_TASK, _UNIT, conditions):
        with progress_bar(f"generation, {policy.tiers}", num_steps, "steps") as bar:
            generated = generate(
                session.make_rows(),
                [(policy.policy, prompt) for prompt in prompts],
                max_tokens,
                lambda output: output[-1] in eos_token_ids,
                bar.update,
            )
        session.results.put({Part(_TASK, policy.tiers, _UNIT, conditions): asdict(generated)})
    return {
        policy.tiers: Generated(**session.results.get(Part(_TASK, policy.tiers, _UNIT, conditions)))
        for policy in session.policies
    }


def missing_overlap_packages() -> list[str]:
    """Return those of the packages for BLEU and ROUGE that are not installed."""
    return [name for name in OVERLAP_PACKAGES if find_spec(name) is None]


def overlap(texts: Sequence[str], native_texts: Sequence[str]) -> Overlap:
    """Return how alike texts are to native's. Needs sacrebleu and rouge-score."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    scorer = RougeScorer(["rougeL"])
    pairs = zip(native_texts, texts, strict=True)
    rouge = [scorer.score(native, text)["rougeL"].fmeasure for native, text in pairs]
    return Overlap(corpus_bleu(list(texts), [list(native_texts)]).score, 100 * sum(rouge) / len(rouge))


def _likeliest(rows: PagedRows, hidden: torch.Tensor) -> list[int]:
    tokens: list[int] = rows.logits(hidden).argmax(-1).tolist()
    return tokens
