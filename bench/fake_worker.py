"""A worker without a model, and requests for it: what drives the scheduler's core where only the core is measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.block_hash import root_hash
from scheduler_svc.core.types import (
    EndingRules,
    Request,
    RequestId,
    SampledRows,
    SeqId,
    StepPlan,
    StepResult,
)

TOKEN = 7  # what every step samples: the core does not look at it
_ROOT = root_hash(b"model", b"tenant", "")


def make_request(name: str, prompt_token_ids: Sequence[int], num_output_tokens: int) -> Request:
    """Return a request that ends after exactly so many tokens."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=prompt_token_ids,
        ending=EndingRules(max_tokens=num_output_tokens),
        sampling=None,
        cache_root=_ROOT,
    )


@dataclass(slots=True)
class _Row:
    seq_epoch: int
    num_tokens: int
    num_computed_tokens: int


class FakeWorker:
    """Answers steps as a worker does."""

    def __init__(self) -> None:
        self.num_prefill_tokens = 0  # of the last step: tokens of rows that computed more than one
        self.num_context_tokens = 0  # likewise: what its rows had in KV after it
        self._rows: dict[SeqId, _Row] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Return a step's result."""
        rows = self._rows
        for seq_id in plan.finished_seq_ids:
            rows.pop(seq_id, None)
        self.num_prefill_tokens = self.num_context_tokens = 0
        seq_ids: list[SeqId] = []
        epochs: list[int] = []
        for new in plan.new_rows:
            rows[new.seq_id] = _Row(new.seq_epoch, len(new.token_ids), new.num_computed_tokens)
            self._compute(new.seq_id, new.num_scheduled_tokens, seq_ids, epochs)
        for resumed in plan.resumed_rows:
            rows[resumed.seq_id] = _Row(resumed.seq_epoch, resumed.num_tokens, resumed.num_computed_tokens)
            self._compute(resumed.seq_id, resumed.num_scheduled_tokens, seq_ids, epochs)
        for continued in plan.continued_rows:
            self._compute(continued.seq_id, continued.num_scheduled_tokens, seq_ids, epochs)
        for seq_id in plan.settled_seq_ids:
            self._compute(seq_id, 1, seq_ids, epochs)
        return StepResult(plan.step_id, sampled=SampledRows(seq_ids, epochs, [TOKEN] * len(seq_ids)))

    def _compute(self, seq_id: SeqId, num_tokens: int, seq_ids: list[SeqId], epochs: list[int]) -> None:
        """Compute a row's tokens; one that has no known token left samples, and is added to the lists."""
        row = self._rows[seq_id]
        row.num_computed_tokens += num_tokens
        self.num_context_tokens += row.num_computed_tokens
        if num_tokens > 1:
            self.num_prefill_tokens += num_tokens
        if row.num_computed_tokens == row.num_tokens:
            row.num_tokens += 1
            seq_ids.append(seq_id)
            epochs.append(row.seq_epoch)
