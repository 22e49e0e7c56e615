"""The rows of beam searches: a search moves on when all its beams have their results, and then its rows change.

    step k     row 1: beam 0      row 2: beam 1      row 3: beam 2
    results    beam 0 has two children, beam 2 one, beam 1 none
    step k+1   row 1: child of 0  row 2: child of 0, sent anew, with the table of row 1    row 3: child of 2

The first child of a beam goes on in its row with the token that was picked. Further ones take rows that are left, and
share the parent's blocks; whoever writes first to a block that is shared does so in a copy. A beam without a child
gives everything back. So no step is planned for a beam before its last result is in.

A search is one thing: where one of its rows is lost or preempted, all of it starts over from the prompt, and when one
can go on no more it ends. Its clients hear nothing before the end, so nothing is told twice.
"""

from scheduler_svc.core.ends import end_whole, leader_last, retire
from scheduler_svc.core.fairness import charge_tokens, spare, stop
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.sequence import Job, Seq, SeqState
from scheduler_svc.core.state import State
from scheduler_svc.core.types import ErrorCode, FinishReason, SchedulerError, TokenRun, TopLogprobs, Usage


def begin(state: State, job: Job) -> None:
    """Queue a search: one of its sequences computes the prompt, and is its first beam."""
    leader = next(seq for seq in job.seqs if seq.end is None)
    job.unforked = [seq for seq in job.seqs if seq is not leader]
    for seq in job.unforked:
        seq.state = SeqState.UNFORKED
    job.beams = [leader]
    job.tops.clear()
    spare(leader, max(seq.num_charged_tokens for seq in job.seqs))  # of the prompt, by another leader
    state.wait(leader)


def start_over(state: State, lane: Lane, job: Job) -> None:
    """Take a search's rows off its lane and send it back to the queue, with nothing but the prompt."""
    assert job.search is not None
    for seq in job.beams:
        lane.remove(seq)
        lane.forget_row(seq)
    for seq in job.seqs:
        stop(seq)
        seq.drop_output()
    job.search.start_over()
    begin(state, job)


def take_top(state: State, seq: Seq, top: TopLogprobs) -> list[TokenRun]:
    """Take the result of a beam's row; with the last one of a step its search moves on, or ends, which is returned."""
    job, search = seq.job, seq.job.search
    assert search is not None
    job.tops[seq] = top
    if len(job.tops) < len(job.beams):
        return []
    tops = [job.tops[beam] for beam in job.beams]
    job.tops.clear()
    search.advance(tops)
    charge_tokens(job.tenant, search.take_uncharged())
    if search.is_over(seq.total_limit_tokens - seq.num_prompt_tokens):
        return _finish(state, job)
    assert seq.lane_id is not None
    _change_rows(state.lanes[seq.lane_id], job)
    return []


def _change_rows(lane: Lane, job: Job) -> None:
    """Give every live beam a row: its parent's, or a copy of that."""
    assert job.search is not None
    parents, job.beams = job.beams, []
    heirs = {beam.parent_idx for beam in job.search.live}
    for idx, childless in enumerate(parents):
        if idx not in heirs:
            lane.remove(childless)
            lane.forget_row(childless)
            childless.state = SeqState.UNFORKED
            job.unforked.append(childless)
    going_on: list[tuple[Seq, int]] = []
    for beam in job.search.live:
        parent, token_id = parents[beam.parent_idx], beam.token_ids[-1]
        if beam.parent_idx in heirs:
            heirs.remove(beam.parent_idx)
            going_on.append((parent, token_id))
            job.beams.append(parent)
        else:
            job.beams.append(_fork(lane, job, parent, token_id))
    for seq, token_id in going_on:  # now that nobody forks from them any more
        seq.token_ids.append(token_id)
    for seq in job.beams:
        spare(seq, len(seq.token_ids))  # the search is charged as a whole


def _fork(lane: Lane, job: Job, parent: Seq, token_id: int) -> Seq:
    """Make an unforked sequence a row that shares all that its parent has computed."""
    child = job.unforked.pop(0)
    child.become_child(parent, token_id)
    lane.fork(parent, child)
    child.num_aged_blocks = parent.num_aged_blocks
    return child


def _finish(state: State, job: Job) -> list[TokenRun]:
    """End a search; returns its answers, best first, each with its end."""
    assert job.search is not None
    seqs, answers = list(job.seqs), job.search.answers()
    if len(answers) < len(seqs):
        message = f"the model has too few tokens for a beam search of width {len(seqs)}"
        error = SchedulerError(ErrorCode.INVALID_ARGUMENT, message, "n")
        return end_whole(state, seqs[0], FinishReason.ERROR, error)
    for seq in leader_last(seqs):
        retire(state, seq)
    runs = []
    for seq, answer in zip(seqs, answers, strict=True):
        if seq.end is None:
            usage = Usage(seq.num_prompt_tokens, job.num_cached_tokens or 0, len(answer.token_ids))
            run = seq.run(0, answer.token_ids, answer.logprobs)
            runs.append(run._replace(finish_reason=answer.finish_reason, usage=usage))
    return runs
