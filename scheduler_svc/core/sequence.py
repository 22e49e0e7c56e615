"""A sequence, the request it belongs to and the tenant who sent that, as the scheduler sees them.

Where a running sequence's tokens stand (two steps may be in flight, so the scheduler runs ahead of what it knows):

    |<------------------- token_ids ------------------->|<- num_in_flight_tokens ->|
    |<-- prompt -->|<-- output tokens that are known -->|   sampled, not yet told  |
    |<-------------- num_computed_tokens ------------->|   KV computed by all steps planned
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from protos.block_hash import BlockHash, next_hash
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.core.block_pool import Block
from scheduler_svc.core.precision import NATIVE_ONLY, PrecisionPolicy
from scheduler_svc.core.types import (
    Delivered,
    EndingRules,
    FinishReason,
    LaneId,
    Opaque,
    Request,
    SchedulerError,
    SeqId,
    TokenIds,
    TokenRun,
    TopLogprobs,
    Usage,
)

Rank = tuple[int, int, int]


class SeqState(Enum):
    """Where a sequence is."""

    UNFORKED = "unforked"  # waits for its request's leader to compute the prompt, or for a beam to continue
    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a row of a lane
    FINISHED = "finished"


class BetterLane(NamedTuple):
    """To which lane a waiting sequence was left last; see `router`."""

    lane_id: LaneId
    num_hits: int  # blocks of its prefix cached there
    most_hits: int  # blocks of its prefix cached in any lane


@dataclass(slots=True, eq=False)
class Tenant:
    """Who sends requests, and what they were served; see `fairness`."""

    name: str
    weight: float
    counter: float = 0.0  # served tokens / weight, from where the tenant began to wait last
    num_seqs: int = 0  # that have not ended
    num_running_seqs: int = 0  # of these, rows of a lane
    waiting: list["Seq"] = field(default_factory=list)  # in the queue, by rank

    @property
    def num_waiting_seqs(self) -> int:
        """Sequences in the queue, and those that wait for their request's leader."""
        return self.num_seqs - self.num_running_seqs


@dataclass(slots=True, eq=False)
class Job:
    """A request and its sequences. One of them, the leader, computes the prompt; the unforked then share its KV.

    The sequences of a beam search are the rows that its beams may have. Which beam a sequence is changes from step to
    step, and clients are told nothing of them before the search is over.
    """

    request: Request
    arrival: int  # orders requests of one priority
    tenant: Tenant
    seqs: list["Seq"] = field(default_factory=list)
    unforked: list["Seq"] = field(default_factory=list)
    num_unfinished: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found in the cache when the leader was first admitted
    # Of a beam search:
    search: BeamSearch | None = None
    beams: list["Seq"] = field(default_factory=list)  # the rows of `search.live`; at first the leader
    tops: dict["Seq", TopLogprobs] = field(default_factory=dict)  # results of this step, until all beams have theirs

    @property
    def keeps_rows(self) -> bool:
        """Whether it is a beam search that runs: rows are kept for its unforked sequences."""
        return any(seq.lane_id is not None for seq in self.beams)


@dataclass(slots=True, eq=False)
class Seq:
    """One sample of a request. `seq_epoch` grows whenever what is in flight for it no longer counts."""

    seq_id: SeqId
    job: Job
    sequence_idx: int
    token_ids: list[int]
    num_prompt_tokens: int
    total_limit_tokens: int  # prompt and output together: it ends when token_ids is that long
    rank: Rank  # of its tenant's the lowest runs first, and is preempted last
    ending: EndingRules
    precision: PrecisionPolicy = NATIVE_ONLY  # of its blocks, in lanes with several formats
    state: SeqState = SeqState.WAITING
    seq_epoch: int = 0
    num_delivered_tokens: int = 0  # output tokens that came with the request, submitted again
    logprobs: list[Opaque] = field(default_factory=list)  # of the output tokens after these, where asked for
    end: TokenRun | None = None  # its terminal run, without tokens
    num_charged_tokens: int = 0  # of token_ids, from the first on: charged to the tenant, or free
    num_losses: int = 0  # steps in flight lost in a row, without a new token between
    times_passed: int = 0  # admissions of others while it did not fit, or had its prefix elsewhere
    passed_since_ms: int | None = None
    homeless_since_ms: int | None = None  # while no lane is large enough for it
    kept_lane_id: LaneId | None = None  # admits nobody else until this sequence fits
    better_lane: BetterLane | None = None  # while it waits
    longest_hint: tuple[LaneId, int] | None = None  # likewise: who had most blocks of its prefix when that was asked
    # The row of a lane; reset by `leave_lane`.
    lane_id: LaneId | None = None
    table: list[Block] = field(default_factory=list)
    num_reserved_blocks: int = 0  # promised at admission, not yet allocated
    num_computed_tokens: int = 0
    num_sealed_blocks: int = 0
    num_aged_blocks: int = 0  # full blocks there were when its blocks were last demoted by age
    # Below this many computed tokens a decode asks nothing of the table, fills no block and does not end by length. It
    # is what makes a row cheap between block borders; whoever shares the row's tail block sets it to 0.
    settled_until_tokens: int = 0
    # What a worker's mirror has of it.
    worker_lane_id: LaneId | None = None
    worker_epoch: int = 0
    _block_hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_in_flight_tokens(self) -> int:
        """Output tokens that steps in flight will tell."""
        return max(0, self.num_computed_tokens + 1 - len(self.token_ids))

    @property
    def num_told_tokens(self) -> int:
        """Output tokens of which clients may know: of a beam none."""
        return self.num_output_tokens if self.job.search is None else 0

    @property
    def num_wanted_rows(self) -> int:
        """Rows that a lane must have free to admit it: a beam search keeps one for each beam to come."""
        return 1 if self.job.search is None else 1 + len(self.job.unforked)

    def block_hashes(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of all full blocks of the known tokens. Do not change the list."""
        hashes = self._block_hashes
        for start in range(len(hashes) * block_size, len(self.token_ids) - block_size + 1, block_size):
            parent = hashes[-1] if hashes else self.job.request.cache_root
            hashes.append(next_hash(parent, self.token_ids[start : start + block_size]))
        return hashes

    def share_hashes(self, parent: "Seq", num_blocks: int) -> None:
        """Take over the hashes of the first blocks, of tokens that both have, rather than compute them anew."""
        self._block_hashes = parent._block_hashes[:num_blocks]

    def take(self, token_ids: TokenIds, logprobs: Sequence[Opaque]) -> TokenRun:
        """Append sampled tokens, up to the one that ends the sequence; return them as a run, still without usage."""
        known = self.token_ids
        num_known = len(known)
        known += token_ids
        reason = None
        if len(known) >= self.total_limit_tokens or not self.ending.stop_token_ids.isdisjoint(token_ids):
            reason = self._cut_at_end(num_known)
            num_taken = len(known) - num_known
            token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
        if logprobs:
            self.logprobs += logprobs
        self.num_losses = 0
        # Past the named tuple's own constructor: that is a Python function, and takes more than twice as long.
        first_token_idx = num_known - self.num_prompt_tokens
        request_id = self.job.request.request_id
        fields = (request_id, self.sequence_idx, first_token_idx, token_ids, logprobs, reason, None, None)
        return tuple.__new__(TokenRun, fields)

    def _cut_at_end(self, num_known_tokens: int) -> FinishReason | None:
        """Drop what comes after the token that ends the sequence; return why it ends, if it does."""
        new_token_ids = self.token_ids[num_known_tokens:]
        del self.token_ids[num_known_tokens:]
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            reason = self.finish_reason()
            if reason is not None:
                return reason
        return None

    def finish_reason(self) -> FinishReason | None:
        """Return why the sequence ends with its last output token, or None."""
        token_ids, ending = self.token_ids, self.ending
        if token_ids[-1] in ending.stop_token_ids and len(token_ids) - self.num_prompt_tokens >= ending.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) >= self.total_limit_tokens else None

    def become_child(self, parent: "Seq", token_id: int) -> None:
        """Have the tokens of another beam, and one more."""
        self.token_ids = [*parent.token_ids, token_id]

    def drop_output(self) -> None:
        """Have the prompt alone."""
        del self.token_ids[self.num_prompt_tokens :]
        self.num_charged_tokens = min(self.num_charged_tokens, self.num_prompt_tokens)
        self._block_hashes = []

    def leave_lane(self) -> None:
        """Forget the row: its KV is given up, and what is in flight for it no longer counts."""
        self.seq_epoch += 1
        self.lane_id = None
        self.table = []
        self.num_reserved_blocks = 0
        self.num_computed_tokens = self.num_sealed_blocks = self.num_aged_blocks = self.settled_until_tokens = 0

    def usage(self) -> Usage:
        """Return the sequence's token counts so far."""
        return Usage(self.num_prompt_tokens, self.job.num_cached_tokens or 0, self.num_told_tokens)

    def begun_run(self) -> TokenRun:
        """Return the run that tells the client that its request is being computed, without tokens."""
        return self.run(self.num_told_tokens)._replace(usage=self.usage())

    def ended_run(self, reason: FinishReason, error: SchedulerError | None) -> TokenRun:
        """Return the terminal run of this sequence, without tokens, and keep it for a client that attaches again."""
        self.end = self.run(self.num_told_tokens)._replace(finish_reason=reason, error=error, usage=self.usage())
        return self.end

    def replay(self, delivered: Delivered | None) -> list[TokenRun]:
        """Return what a client that attaches again has not got of it: that it has begun, tokens, and its end."""
        if delivered is not None and delivered.finish_reason is not None:
            return []
        first = len(delivered.token_ids) if delivered else 0
        token_ids = self.token_ids[self.num_prompt_tokens + first : self.num_prompt_tokens + self.num_told_tokens]
        run = self.run(first, token_ids, self.logprobs[max(0, first - self.num_delivered_tokens) :])
        if self.end is not None:
            end = self.end
            return [run._replace(finish_reason=end.finish_reason, error=end.error, usage=end.usage)]
        if self.job.num_cached_tokens is None:
            return [run] if token_ids else []
        return [run._replace(usage=self.usage())]

    def run(self, first_token_idx: int, token_ids: TokenIds = (), logprobs: Sequence[Opaque] = ()) -> TokenRun:
        """Return output tokens of this sequence as its client gets them."""
        return TokenRun(self.job.request.request_id, self.sequence_idx, first_token_idx, token_ids, logprobs)
