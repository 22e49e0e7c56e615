"""Perplexity, KL divergence from native and agreement of top tokens, over a text.

The text is cut in windows, which are scored apart from each other. Each window runs once native and once under every
policy, all as rows of the same steps, so that the weights are read once for all and the native logits, a vocabulary
wide, are compared on the fly and never kept. Window w has tokens w * W to (w + 1) * W and predicts from each of its
first W the one after it: over the text every token but the first is predicted once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from quire.eval.errors import EvalMistakeError
from quire.eval.paged import PagedRows
from quire.eval.results import Part, digest
from quire.eval.session import Session, progress_bar
from scheduler_svc.core.precision import PrecisionPolicy

_TASK = "text"
_STEP_TOKENS = 512  # beyond which a step's tokens do not get cheaper


@dataclass(frozen=True, slots=True)
class TextScore:
    """Sums over the predicted tokens of a text, or of a part of it."""

    num_tokens: int = 0
    nll_nats: float = 0.0  # negative log-likelihood of the text's own tokens
    kl_nats: float = 0.0  # KL(native || policy) of the predictions
    num_agreed: int = 0  # predictions whose most likely token is native's

    def __add__(self, other: "TextScore") -> "TextScore":
        return TextScore(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(self.nll_nats / self.num_tokens)

    @property
    def kl(self) -> float:
        """Mean divergence from native, nats a token."""
        return self.kl_nats / self.num_tokens

    @property
    def agreement(self) -> float:
        """Share of predictions whose most likely token is native's."""
        return self.num_agreed / self.num_tokens


def check_text(token_ids: Sequence[int], flag: str) -> None:
    """Raise EvalMistakeError where nothing of a text can be predicted from what is before it."""
    if len(token_ids) < 2:
        raise EvalMistakeError(f"{flag}: the text has {len(token_ids)} tokens, 2 are the least")


def cut_windows(token_ids: Sequence[int], window_tokens: int) -> list[Sequence[int]]:
    """Return the windows: `window_tokens` and the token after them, which is the next one's first."""
    return [token_ids[begin : begin + window_tokens + 1] for begin in range(0, len(token_ids) - 1, window_tokens)]


def score_windows(
    rows: PagedRows,
    windows: Sequence[Sequence[int]],
    policies: Sequence[PrecisionPolicy],
    prefix: Sequence[int],
    on_tokens: Callable[[int], object],
) -> list[list[TextScore]]:
    """Return each window's score under each policy, the first of which is native: what the others are compared with.

    `prefix` comes before each window. Neither it nor a window's first token, the last of the window before, is scored.
    `on_tokens` is told how many tokens a step computed.
    """
    assert not policies[0].narrowing, "the first policy is native"
    started = [[rows.start(policy) for policy in policies] for _ in windows]
    feeds = [(row, [*prefix, *window[:-1]]) for window, group in zip(windows, started, strict=True) for row in group]
    targets = [torch.tensor([*prefix, *window][1:]) for window in windows]
    scores = [[TextScore()] * len(policies) for _ in windows]
    begins = [0] * len(windows)
    for hidden in rows.run(feeds):
        for window_idx in range(len(windows)):
            chunks = hidden[window_idx * len(policies) : (window_idx + 1) * len(policies)]
            begin, num_tokens = begins[window_idx], len(chunks[0])
            begins[window_idx] += num_tokens
            skipped = min(num_tokens, max(0, len(prefix) - begin))
            if num_tokens > skipped:
                expected = targets[window_idx][begin + skipped : begin + num_tokens]
                gained = _score_chunks(rows, [chunk[skipped:] for chunk in chunks], expected)
                scores[window_idx] = [old + new for old, new in zip(scores[window_idx], gained, strict=True)]
        on_tokens(sum(map(len, hidden)))
    rows.release([row for group in started for row in group])
    return scores


def measure_text(session: Session, token_ids: Sequence[int], window_tokens: int) -> dict[str, TextScore]:
    """Return the score of each policy, by its tiers; windows that were scored before are not scored again."""
    windows = cut_windows(token_ids, window_tokens)
    prefix = session.model.codec.prefix
    conditions = session.conditions(text=digest([*prefix, *token_ids]), window_tokens=window_tokens)
    units = [f"window {window_idx}" for window_idx in range(len(windows))]
    batch_windows = max(1, _STEP_TOKENS // (len(session.policies) * session.block_size))
    for begin in range(0, len(windows), batch_windows):
        batch = range(begin, min(begin + batch_windows, len(windows)))
        due = {policy.tiers: policy for idx in batch for policy in session.missing(_TASK, units[idx], conditions)}
        if not due:
            continue
        policies = [session.native, *(policy for tiers, policy in due.items() if tiers != session.native.tiers)]
        total = len(policies) * sum(len(prefix) + len(windows[idx]) - 1 for idx in batch)
        title = f"text, {len(policies)} policies, window {batch[0] + 1} to {batch[-1] + 1} of {len(windows)}"
        with progress_bar(title, total, "tokens") as bar:
            scores = score_windows(
                session.make_rows(),
                [windows[idx] for idx in batch],
                [policy.policy for policy in policies],
                prefix,
                bar.update,
            )
        session.results.put(
            {
                Part(_TASK, policy.tiers, units[idx], conditions): asdict(score)
                for idx, group in zip(batch, scores, strict=True)
                for policy, score in zip(policies, group, strict=True)
            }
        )
    return {
        policy.tiers: sum(
            (TextScore(**session.results.get(Part(_TASK, policy.tiers, unit, conditions))) for unit in units),
            TextScore(),
        )
        for policy in session.policies
    }


@torch.inference_mode()
def _score_chunks(rows: PagedRows, hidden: Sequence[Tensor], targets: Tensor) -> list[TextScore]:
    """Return the scores of the same T tokens under each policy, native first, from their hidden states [T, H]."""
    logits = rows.logits(torch.cat(list(hidden))).view(len(hidden), len(targets), -1)
    targets = targets.to(logits.device)
    native = torch.log_softmax(logits[0], dim=-1)
    probabilities, native_top = native.exp(), native.argmax(-1)
    scores = []
    for policy_idx, policy_logits in enumerate(logits):
        log_probs = native if policy_idx == 0 else torch.log_softmax(policy_logits, dim=-1)
        kl = torch.einsum("tv,tv->t", probabilities, native - log_probs)
        nll = -log_probs.gather(1, targets[:, None])
        scores.append(
            TextScore(
                num_tokens=len(targets),
                nll_nats=float(nll.double().sum()),
                kl_nats=float(kl.double().sum()),
                num_agreed=int((log_probs.argmax(-1) == native_top).sum()),
            )
        )
    return scores
