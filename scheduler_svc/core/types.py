"""The core's values: what goes into it (requests, step results) and what comes out (step plans, token runs).

They mirror `protos/` without importing it. What the core never looks at (sampling parameters, logprobs) passes through
as an opaque object. Times are milliseconds of the scheduler's own monotonic clock, handed in as arguments.

Values are frozen dataclasses. What every row brings to every step is packed instead: lists of numbers (SampledRows,
StepPlan.settled_seq_ids) and named tuples, which cost a third of a dataclass to make. With more objects for each row, a
few hundred rows would wake the garbage collector at every step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple, NewType, Protocol, TypeVar, runtime_checkable

from protos.block_hash import BlockHash

RequestId = NewType("RequestId", str)
LaneId = NewType("LaneId", str)  # a worker's instance_id
SeqId = NewType("SeqId", int)  # never used twice
StepId = NewType("StepId", int)  # 1, 2, 3 ... within a lane
BlockId = NewType("BlockId", int)  # slab_idx * 256 + place in the slab
Entry = NewType("Entry", int)  # block_id * 8 + format code

TokenIds = Sequence[int]
Opaque = object  # handed through unread
_T = TypeVar("_T")


class Format(IntEnum):
    """How a block's bytes encode KV, from the widest to the narrowest; the code is part of every entry.

    How many blocks of each a slab holds is what the worker says (LaneSpec).
    """

    NATIVE = 0
    INT8 = 1
    FP8 = 2
    K8V4 = 3  # int8 keys, int4 values
    INT4 = 4


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(Enum):
    """What kind of failure an error is."""

    INVALID_ARGUMENT = "invalid_argument"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INTERNAL = "internal"


class SchedulerError(Exception):
    """A request cannot be served; `param` names the request parameter at fault, where one is."""

    def __init__(self, code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


# ---- in


@dataclass(frozen=True, slots=True)
class EndingRules:
    """When the scheduler ends a sequence. `stop_token_ids` holds the end-of-sequence tokens too, unless ignored."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a gateway already has of one sequence of a request that it submits again."""

    token_ids: TokenIds
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class BeamParams:
    """What a request that is a beam search asks for; the width of the search is the request's n."""

    length_penalty: float = 1.0  # above 0 it favours long answers, below 0 short ones
    num_logprobs: int | None = None  # alternatives that the client wants of each token; None: no log probabilities


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request: one prompt, n sequences."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    ending: EndingRules
    sampling: Opaque  # for the worker
    cache_root: BlockHash  # protos.block_hash.root_hash: only requests with the same root share blocks
    n: int = 1
    beam_search: BeamParams | None = None  # its n sequences are the best that such a search finds
    tenant: str = ""
    priority: int = 0  # lower runs first
    deadline_ms: int | None = None
    skip_cache_read: bool = False
    kv_precision_floor: Format | None = None  # its blocks are kept in nothing narrower
    is_resubmit: bool = False  # it was let in before: past the queue's bound, and before all that is new
    delivered: dict[int, Delivered] = field(default_factory=dict)  # by sequence index


@dataclass(frozen=True, slots=True)
class LaneSpec:
    """What a worker offers."""

    num_blocks: int  # native blocks of the arena
    blocks_per_slab: int  # native
    block_size: int  # tokens
    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # tokens a step
    max_model_len: int  # tokens, prompt and output together
    quantized_blocks_per_slab: Mapping[Format, int] = field(default_factory=dict)  # of the other formats that it has
    recipe_versions: Mapping[Format, int] = field(default_factory=dict)  # how it makes them; 0 where nothing is said

    @property
    def num_slabs(self) -> int:
        """Slabs of the arena."""
        return -(-self.num_blocks // self.blocks_per_slab)

    @property
    def capacities(self) -> dict[Format, int]:
        """How many blocks of each format fit in a slab."""
        return {Format.NATIVE: self.blocks_per_slab, **self.quantized_blocks_per_slab}


@dataclass(frozen=True, slots=True)
class FairnessPolicy:
    """What tenants are entitled to."""

    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant's name, above 0; 1 for all others
    max_running_seqs: int | None = None  # of a tenant at once, in all lanes
    max_kv_share: float | None = None  # of a lane's blocks, above 0 and up to 1


@runtime_checkable
class TopLogprobs(Protocol):
    """The likeliest tokens at a place, best first: what a row of a beam search brings beside its token."""

    @property
    def top_token_ids(self) -> Sequence[int]:
        """Token ids, equally likely ones by id."""

    @property
    def top_logprobs(self) -> Sequence[float]:
        """Their log probabilities."""


class StepStatus(Enum):
    """How a step went."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Tokens that rows sampled, as parallel arrays. It is checked where it is made: the arrays fit each other."""

    seq_ids: Sequence[SeqId] = ()
    seq_epochs: Sequence[int] = ()
    token_ids: Sequence[int] = ()  # of all rows, in row order
    nums_tokens: Sequence[int] = ()  # empty: one for every row
    logprobs: Sequence[Opaque] = ()  # parallel to token_ids; empty: no row asked for them

    def rows(self) -> Iterator[tuple[SeqId, int, TokenIds, Sequence[Opaque]]]:
        """Return each row's sequence, its epoch, the tokens, and their logprobs or nothing."""
        logprobs = self._by_row(self.logprobs) if self.logprobs else repeat(())
        return zip(self.seq_ids, self.seq_epochs, self._by_row(self.token_ids), logprobs, strict=False)

    def _by_row(self, values: Sequence[_T]) -> Iterator[Sequence[_T]]:
        if not self.nums_tokens:
            return zip(values, strict=True)
        return (values[start:end] for start, end in pairwise(accumulate(self.nums_tokens, initial=0)))


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that the worker could not compute; it skips the row until it is sent anew."""

    seq_id: SeqId
    seq_epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """A worker's answer to a step plan."""

    step_id: StepId
    status: StepStatus = StepStatus.OK
    error: str = ""
    sampled: SampledRows = field(default_factory=SampledRows)
    failed_rows: Sequence[FailedRow] = ()
    step_ms: float = 0.0


# ---- out: step plans


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row that the worker does not have."""

    seq_id: SeqId
    seq_epoch: int
    token_ids: TokenIds  # prompt, then known output tokens
    num_prompt_tokens: int
    entries: Sequence[Entry]
    num_computed_tokens: int
    num_scheduled_tokens: int
    sequence_idx: int
    sampling: Opaque


@dataclass(frozen=True, slots=True)
class ResumedRow:
    """A preempted row that goes on where the worker still has its tokens; `entries` replaces its table."""

    seq_id: SeqId
    seq_epoch: int
    num_tokens: int  # what the worker has beyond these is dropped
    entries: Sequence[Entry]
    num_computed_tokens: int
    num_scheduled_tokens: int


class ContinuedRow(NamedTuple):
    """A row that goes on: tokens of this step, and entries appended to its table."""

    seq_id: SeqId
    num_scheduled_tokens: int
    new_entries: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class EntryPatch:
    """A change in the middle of a row's block table."""

    seq_id: SeqId
    block_idx: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Seal:
    """A full block whose contents are known by their hash."""

    entry: Entry
    block_hash: BlockHash
    recipe_version: int = 0  # of the entry's format


@dataclass(frozen=True, slots=True)
class BlockOps:
    """Operations that run before the step's forward. No place is written by two of them or read by one and written."""

    zero: Sequence[Entry] = ()
    copy: Sequence[tuple[Entry, Entry]] = ()  # (source, destination), of one format
    requantize: Sequence[tuple[Entry, Entry]] = ()  # (source, destination); the destination's format is narrower


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of one lane: only what changed since the step before."""

    step_id: StepId
    restart: bool
    finished_seq_ids: Sequence[SeqId]
    resumed_rows: Sequence[ResumedRow]
    new_rows: Sequence[NewRow]
    continued_rows: Sequence[ContinuedRow]
    settled_seq_ids: Sequence[SeqId]  # rows that go on with one token and nothing else: most rows of most steps
    picked_tokens: Sequence[tuple[SeqId, int]]  # of continued rows, in place of the tokens that the worker sampled
    patches: Sequence[EntryPatch]
    seals: Sequence[Seal]
    ops: BlockOps


# ---- out: what clients get


@dataclass(frozen=True, slots=True)
class Usage:
    """A request's token counts; `num_cached_tokens` is that of the first attempt."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PickedLogprobs:
    """Log probabilities of a token that a beam search picked."""

    logprob: float
    top: TopLogprobs
    num_top: int  # so many of `top` are for the client


class TokenRun(NamedTuple):
    """New output tokens of one sequence. Exactly one run of a sequence has a finish reason.

    One with usage and without a finish reason tells that a worker has begun to compute the request.
    """

    request_id: RequestId
    sequence_idx: int
    first_token_idx: int
    token_ids: TokenIds = ()
    logprobs: Sequence[Opaque] = ()
    finish_reason: FinishReason | None = None
    error: SchedulerError | None = None
    usage: Usage | None = None


# ---- seams and figures


class Encoding(NamedTuple):
    """How a lane keeps a block; of several copies, how it kept the one sealed or narrowed last."""

    fmt: Format
    recipe_version: int


class PrefixIndex(Protocol):
    """Which lanes hold which blocks. What it says is a hint: the lane's own tables decide."""

    def publish(self, lane_id: LaneId, blocks: Mapping[BlockHash, Encoding]) -> None:
        """Record that the lane holds these blocks, and how."""

    def withdraw(self, lane_id: LaneId, block_hashes: Sequence[BlockHash]) -> None:
        """Record that the lane holds these blocks no more; unknown ones are ignored."""

    def drop_lane(self, lane_id: LaneId) -> None:
        """Forget all that was said of the lane."""

    def longest_prefix(self, block_hashes: Sequence[BlockHash]) -> dict[LaneId, int]:
        """Return, for each lane that holds the first hash, how many of the hashes it holds from the first on."""


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler's start."""

    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    preemptions: int = 0
    prompt_tokens: int = 0  # computed
    output_tokens: int = 0
    steps: int = 0
    evicted_blocks: int = 0
    demoted_blocks: int = 0  # put in a narrower format because of their age
    pressed_blocks: int = 0  # narrowed beyond their age because room was short
    moved_blocks: int = 0  # put elsewhere to empty a slab
    worker_losses: int = 0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """A lane as it is now, in native blocks and token slots."""

    lane_id: LaneId
    num_running_seqs: int
    num_blocks: int
    num_free_blocks: int  # neither referenced nor cached
    num_cached_blocks: int  # cached, referenced by nobody
    num_quarantined_blocks: int
    num_referenced_blocks: Sequence[int]  # by format code, each in blocks of its own
    num_allocated_slots: int  # of decoding rows
    num_used_slots: int
    num_steps_in_flight: int
    is_draining: bool
