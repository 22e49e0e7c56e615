"""How a cell's rows are spread over its workers: figures of the samples that its Watch stream gives."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from protos import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Sample:
    """A cell at one moment."""

    time_s: float  # on time.perf_counter
    num_waiting: int
    num_rows: dict[str, int]  # by worker instance
    longest_step_ms: float  # of the workers' last steps

    @property
    def num_seqs(self) -> int:
        """Sequences in the cell."""
        return self.num_waiting + sum(self.num_rows.values())

    @property
    def idle_workers(self) -> set[str]:
        """Workers without a row."""
        return {worker for worker, num_rows in self.num_rows.items() if not num_rows}


@dataclass(slots=True)
class Samples:
    """Collects a cell's samples: `look` is for bench.watch."""

    seen: list[Sample] = field(default_factory=list)

    def look(self, now_s: float, stats: scheduler_pb2.CellStats) -> None:
        """Take a cell's figures in."""
        num_rows = {lane.instance_id: lane.num_running_seqs for lane in stats.lanes}
        longest_step_ms = max((lane.last_step_ms for lane in stats.lanes), default=0.0)
        self.seen.append(Sample(now_s, stats.num_waiting_seqs, num_rows, longest_step_ms))


def steady_part(samples: Sequence[Sample], num_seqs: int) -> list[Sample]:
    """Return the samples from the first to the last that shows so many sequences at once; there must be some."""
    full = [idx for idx, sample in enumerate(samples) if sample.num_seqs >= num_seqs]
    return list(samples[full[0] : full[-1] + 1])


def busy_share(samples: Sequence[Sample]) -> float:
    """Return the share of samples in which every worker has a row."""
    return sum(not sample.idle_workers for sample in samples) / len(samples)


def mean_rows(samples: Sequence[Sample]) -> list[float]:
    """Return each worker's rows, averaged over time: what a sample shows counts until the next one."""
    duration_s = samples[-1].time_s - samples[0].time_s
    return [
        sum(sample.num_rows[worker] * (after.time_s - sample.time_s) for sample, after in pairwise(samples))
        / duration_s
        for worker in samples[0].num_rows
    ]


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which requests waited although a worker had no row."""

    duration_s: float
    longest_step_s: float  # of the steps that ended meanwhile

    @property
    def is_for_a_step(self) -> bool:
        """Whether it lasted no longer than a step."""
        return self.duration_s <= self.longest_step_s


def waits_beside_idle(samples: Sequence[Sample]) -> list[Wait]:
    """Return the times in which a sequence waits and the same worker has no row, in two samples on end or more.

    In a single one it may be between its arrival and the plan that takes it, one turn of the scheduler's event loop
    later.
    """
    waits: list[Wait] = []
    run: list[Sample] = []
    for before, sample in pairwise(samples):
        if before.num_waiting and sample.num_waiting and before.idle_workers & sample.idle_workers:
            run += [sample] if run else [before, sample]
            continue
        if run:
            longest_step_ms = max(each.longest_step_ms for each in (*run, sample))
            waits.append(Wait(run[-1].time_s - run[0].time_s, longest_step_ms / 1e3))
        run = []
    return waits
