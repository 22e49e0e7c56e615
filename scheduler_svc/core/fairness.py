"""Whose turn it is: tenants share the workers by the tokens that they are served, however many requests each sends.

Every tenant has a counter of served tokens, divided by its weight (the virtual token counter of Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024, section 4). A lane that has room takes the next sequence of the tenant
with the lowest counter; inside a tenant rank decides: priority, then age. So no tenant waits for another's backlog, and
none is held back while there is room. With one tenant the order is that of rank.

*What is charged.* Each token once: of a prompt when a step computes it, of the output when it was sampled, both alike.
Never what the prefix cache gave, nor what is computed again after a preemption, a loss or a restart. Output tokens are
charged when their row crosses a block border or leaves its lane, so between borders a row costs nothing here; a counter
is late by less than a block and two steps for each row. A beam search is charged for the tokens of its live beams, once
for every length, and counts as so many rows of its tenant as it may have beams.

*Back from idle.* Whoever begins to wait starts at the virtual time at least: the counter at which a sequence was taken
out of the queue last, or, with nobody waiting since, the counter of its tenant now. Of those that waited and could go
it was the lowest. So credit cannot be saved up; and a tenant held up by its own limit, whose counter is old and low,
does not let newcomers in below everybody else. The record of an idle tenant is kept while its counter is above the
virtual time, else leaving for a moment would wipe out what it was served. When the cell is idle all are dropped.

*Exceptions to the order.* What was let in before a restart goes before all that is new, whoever sent it: somebody is
reading these streams. A tenant whose sequence cannot go (it does not fit, its prefix is under way, another lane is
better, or full and has its prefix) steps behind all others for the rest of this plan, so that its large requests do not
use up the looks that a plan takes. Those that were looked at before the one that is admitted count as passed, as with
one tenant, and in the end a lane is kept for them (policy.keeps_lane). It is kept from those whose turn comes later: a
tenant that was served less may still go before, until its counter has grown, and so nobody is passed for ever.

*Prompts half computed.* A prompt is admitted whole and computed in chunks, and a long one must not hold up the others
for so long. So a tenant of whom nothing runs may begin before the half computed prompts of others, in its turn
(`goes_before`), and a step's chunks go first to whoever has fewest rows (`prompt_order`).

*Limits.* A tenant at its limit is passed over with all that it has waiting, in its order, and blocks nobody. The KV
share counts where a sequence joins, by known tokens. A tenant that has nothing in a lane may run one sequence of any
size there: shares differ from lane to lane, so a refusal would depend on which workers live just then. Rows may grow
beyond the share; where room is short their tenant is the one that gives way (`pick_victim`).
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from scheduler_svc.core.kv_manager import KVManager
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.sequence import Rank, Seq, SeqState, Tenant
from scheduler_svc.core.types import FairnessPolicy


class FairQueue:
    """Waiting sequences by tenant and rank, and the tenants' books."""

    def __init__(self, policy: FairnessPolicy) -> None:
        self._policy = policy
        self._tenants: dict[str, Tenant] = {}
        self._num_waiting = 0
        self._virtual_time = 0.0
        self._last_started: Tenant | None = None

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Seq]:
        """Iterate over a snapshot, tenant by tenant, best rank first."""
        return iter([seq for tenant in self._tenants.values() for seq in tenant.waiting])

    @property
    def num_tenants(self) -> int:
        """Tenants with a record."""
        return len(self._tenants)

    def tenant(self, name: str) -> Tenant:
        """Return a tenant's record, a new one if need be."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._policy.weights.get(name, 1.0))
        return tenant

    def num_waiting_seqs_of(self, name: str) -> int:
        """Return how many sequences of a tenant wait: in the queue, or for their request's leader."""
        tenant = self._tenants.get(name)
        return tenant.num_waiting_seqs if tenant is not None else 0

    def add(self, seq: Seq) -> None:
        """Put `seq` in its place; its tenant, if it had nothing waiting, starts at the virtual time at least."""
        tenant = seq.job.tenant
        if not tenant.waiting:
            tenant.counter = max(tenant.counter, self._advance())
        insort(tenant.waiting, seq, key=_rank)
        self._num_waiting += 1

    def remove(self, seq: Seq) -> None:
        """Take `seq` out; it must be in."""
        seq.job.tenant.waiting.remove(seq)
        self._num_waiting -= 1

    def start(self, seq: Seq) -> None:
        """Take `seq` out because it becomes a row, before the row's first tokens are charged."""
        tenant = seq.job.tenant
        self._virtual_time = max(self._virtual_time, tenant.counter)
        self._last_started = tenant
        self.remove(seq)
        tenant.num_running_seqs += seq.num_wanted_rows

    def in_turn(self, is_barred: Callable[[Seq], bool]) -> Iterator[Seq]:
        """Yield the sequences that wait now in the order in which a plan looks at them.

        One that still waits when the next is asked for could not go. When `is_barred` says so of a sequence in its
        turn, neither it nor what follows of its tenant is yielded.
        """
        lines = [iter(tuple(tenant.waiting)) for tenant in self._tenants.values() if tenant.waiting]
        turns = [turn for line in lines if (turn := _next_turn(line, 0)) is not None]
        heapify(turns)
        while turns:
            num_skipped, _, _, _, seq, line = turns[0]
            if is_barred(seq):
                heappop(turns)
                continue
            yield seq
            turn = _next_turn(line, num_skipped + (seq.state is SeqState.WAITING))
            if turn is None:
                heappop(turns)
            else:
                heapreplace(turns, turn)

    def is_at_running_limit(self, tenant: Tenant, num_wanted_rows: int) -> bool:
        """Return whether the tenant has so many rows that it may not have so many more."""
        most = self._policy.max_running_seqs
        return most is not None and tenant.num_running_seqs + num_wanted_rows > most

    def exceeds_kv_share(self, seq: Seq, lane: Lane) -> bool:
        """Return whether `seq` and what its tenant has in the lane are more than its share of the lane's blocks.

        It is not while the tenant has nothing there.
        """
        share = self._policy.max_kv_share
        if share is None:
            return False
        kv = lane.kv
        held = [kv.num_native_blocks(row) for row in lane.rows() if row.job.tenant is seq.job.tenant]
        return bool(held) and sum(held) + kv.num_native_blocks(seq) > share * kv.pool.num_blocks

    def forget_idle(self) -> None:
        """Drop the records of tenants that have no sequence here, where they would make no difference."""
        if not any(tenant.num_seqs for tenant in self._tenants.values()):
            self._tenants = {}
            self._virtual_time, self._last_started = 0.0, None
            return
        virtual_time = self._advance()
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.num_seqs or tenant.counter > virtual_time
        }

    def _advance(self) -> float:
        """Return the virtual time. With nobody waiting it goes with the tenant that was the last to get a row."""
        if not self._num_waiting and self._last_started is not None:
            self._virtual_time = max(self._virtual_time, self._last_started.counter)
        return self._virtual_time

    def check_integrity(self, seqs: Sequence[Seq]) -> None:
        """Raise AssertionError unless the books agree with `seqs`, all that have not ended."""
        assert self._num_waiting == sum(len(tenant.waiting) for tenant in self._tenants.values())
        for name, tenant in self._tenants.items():
            own = [seq for seq in seqs if seq.job.tenant is tenant]
            assert all(seq.job.request.tenant == name for seq in own), "a sequence is charged to another"
            assert tenant.num_seqs == len(own)
            num_kept = sum(seq.state is SeqState.UNFORKED and seq.job.keeps_rows for seq in own)
            assert tenant.num_running_seqs == num_kept + sum(seq.state is SeqState.RUNNING for seq in own)
            assert self._policy.max_running_seqs is None or tenant.num_running_seqs <= self._policy.max_running_seqs
            waiting = sorted((seq for seq in own if seq.state is SeqState.WAITING), key=_rank)
            assert tenant.waiting == waiting, "out of order"
        for seq in seqs:
            assert self._tenants.get(seq.job.request.tenant) is seq.job.tenant, "a tenant without a record"
            assert seq.num_charged_tokens <= len(seq.token_ids), "charged before it was served"
            if seq.state is not SeqState.RUNNING and seq.num_output_tokens:
                assert seq.num_charged_tokens == len(seq.token_ids), "served, and not charged"


_Turn = tuple[int, bool, float, Rank, Seq, Iterator[Seq]]  # the lowest goes first; no two have the same rank


def _next_turn(line: Iterator[Seq], num_skipped: int) -> _Turn | None:
    """Return when the next of a tenant's line has its turn; None at its end."""
    seq = next(line, None)
    if seq is None:
        return None
    return (num_skipped, not seq.job.request.is_resubmit, seq.job.tenant.counter, seq.rank, seq, line)


def _rank(seq: Seq) -> Rank:
    return seq.rank


def prompt_order(row: Seq) -> tuple[int, float, Rank]:
    """Return what sorts rows whose prompts are half computed: those of tenants with few rows go first.

    Not by served tokens alone: prompts of two tenants would take turns chunk by chunk, and both would be late.
    """
    tenant = row.job.tenant
    return tenant.num_running_seqs, tenant.counter, row.rank


def goes_before(tenant: Tenant, other: Tenant) -> bool:
    """Return whether a new prompt of `tenant` goes before a half computed one of `other`.

    It does when nothing of the tenant runs and it was not served more: so it waits for no long prompt of others.
    """
    return not tenant.num_running_seqs and tenant.counter <= other.counter


def charge(seq: Seq, num_tokens: int) -> None:
    """Charge the tenant for the first `num_tokens` of `seq`, less what it was charged for, or spared, before."""
    num_new = num_tokens - seq.num_charged_tokens
    if num_new > 0:
        seq.num_charged_tokens = num_tokens
        charge_tokens(seq.job.tenant, num_new)


def charge_tokens(tenant: Tenant, num_tokens: int) -> None:
    """Charge the tenant for tokens that it was served."""
    tenant.counter += num_tokens / tenant.weight


def spare(seq: Seq, num_tokens: int) -> None:
    """Never charge for the first `num_tokens` of `seq`: they are not computed for it, or were in an earlier life."""
    seq.num_charged_tokens = max(seq.num_charged_tokens, num_tokens)


def stop(seq: Seq) -> None:
    """Close the account of a row, or of one that a search kept, as it leaves its lane: what it sampled is charged."""
    seq.job.tenant.num_running_seqs -= 1
    if seq.num_output_tokens:  # else its prompt may be half computed, and was charged chunk by chunk
        charge(seq, len(seq.token_ids))


def pick_victim(rows: Sequence[Seq], kv: KVManager) -> Seq:
    """Return whom to preempt: the newest row of the tenant that holds most KV for its weight.

    Not of the most served: two tenants that preempt each other would overtake each other at every turn, and compute
    their prompts again and again. A tenant's only row, or its only beam search, is spared while another has several,
    so the oldest of all is never preempted for others, and something always gets done. With one tenant it is the newest
    of the lowest priority.
    """
    held: dict[Tenant, list[Seq]] = {}
    for seq in rows:
        held.setdefault(seq.job.tenant, []).append(seq)
    if len(held) > 1:
        several = [seqs for seqs in held.values() if not _are_one(seqs)]
        if several:
            rows = max(several, key=lambda seqs: sum(map(kv.num_native_blocks, seqs)) / seqs[0].job.tenant.weight)
    return max(rows, key=_rank)


def _are_one(rows: Sequence[Seq]) -> bool:
    """Return whether rows come and go together: there is one, or they are the beams of one search."""
    first = rows[0]
    return len(rows) == 1 or (first.job.search is not None and all(row.job is first.job for row in rows))
