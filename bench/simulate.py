"""More workers than any one machine has: the real core and router against simulated workers in virtual time.

Requests have prompt and output lengths as conversations have them (log-normal), and begin with one of many shared
prompts (Zipf), more than the KV of one worker holds. Four ways to spread them are compared: this router, which sees all
lanes' tables and binds late; and random, round robin and fewest-requests, which give a request to a worker when it
comes, as a balancer before independent servers does. They are compared at two rates: one that the fleet serves with
ease, where what differs is the time to the first token, and one that is beyond it, where it is the throughput.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean

from pydantic import Field
from pydantic_settings import CliApp

from bench.compare import CompareSettings, conclude
from bench.fake_worker import make_request
from bench.fleet import Fleet, Spread
from bench.report import Finding, at_least, percentile, say, table
from scheduler_svc.collector import collect_rarely
from scheduler_svc.core.types import Request

VOCAB_SIZE = 100_000


class SimulateSettings(CompareSettings):
    """Flags of the simulation."""

    workers: int = Field(8, ge=1, description="simulated workers")
    requests: int = Field(12_000, ge=100, description="requests at each rate")
    rates: str = Field("8,60", description="requests a second for each worker, by comma: one table for each rate")
    policies: str = Field("prefix-aware,fewest,round-robin,random", description="ways to spread requests, by comma")
    shared_prompts: int = Field(512, ge=0, description="shared prompts that requests begin with; 0: none")
    shared_tokens: int = Field(1000, ge=1, description="tokens of a shared prompt")
    seed: int = Field(1, description="of the first repeat's workload")


def make_requests(settings: SimulateSettings, rate: float, seed: int) -> Iterator[tuple[float, Request]]:
    """Yield each request with its time of arrival in ms."""
    rng = random.Random(seed)
    shared = [
        [rng.randrange(VOCAB_SIZE) for _ in range(settings.shared_tokens)] for _ in range(settings.shared_prompts)
    ]
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(shared))))
    now_ms = 0.0
    for number in range(settings.requests):
        now_ms += rng.expovariate(rate * settings.workers) * 1e3
        own = [rng.randrange(VOCAB_SIZE) for _ in range(min(4000, max(8, int(rng.lognormvariate(4.6, 1.1)))))]
        num_output_tokens = min(1500, max(4, int(rng.lognormvariate(4.9, 0.9))))
        prefix = rng.choices(shared, cum_weights=weights)[0] if shared else []
        yield now_ms, make_request(f"r{number}", [*prefix, *own], num_output_tokens)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a fleet did with a load; times in ms of virtual time, the core's in microseconds of this machine's."""

    output_tokens_per_s: float  # while the second half of the requests came: the fleet is full then, or never
    good_per_s: float  # requests that ended then, with a first token within 1 s and then 50 ms a token
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    hit_share: float  # of prompt tokens
    busy_max_to_mean: float
    core_us_per_step: float
    core_us_per_row: float  # and step
    core_us_per_request: float

    @classmethod
    def of(cls, fleet: Fleet) -> "Figures":
        """Return the figures of a fleet whose requests have all ended."""
        progress = list(fleet.progress.values())
        begin_s = int(progress[len(progress) // 2].arrival_ms / 1e3)
        end_s = max(begin_s + 1, int(progress[-1].arrival_ms / 1e3))
        ttft_ms, tpot_ms, num_good = [], [], 0
        for p in progress:
            assert p.first_token_ms is not None
            assert p.end_ms is not None
            ttft_ms.append(p.first_token_ms - p.arrival_ms)
            tpot_ms.append((p.end_ms - p.first_token_ms) / (p.num_output_tokens - 1))
            num_good += begin_s <= p.end_ms / 1e3 < end_s and ttft_ms[-1] <= 1000 and tpot_ms[-1] <= 50
        counters = [core.scheduler.counters for core in fleet.cores]
        busy_ms = [lane.busy_ms for lane in fleet.lanes]
        core_us = 1e6 * sum(core.cpu_s for core in fleet.cores)
        return cls(
            output_tokens_per_s=sum(fleet.num_output_tokens_at[s] for s in range(begin_s, end_s)) / (end_s - begin_s),
            good_per_s=num_good / (end_s - begin_s),
            ttft_p50_ms=percentile(ttft_ms, 0.5),
            ttft_p99_ms=percentile(ttft_ms, 0.99),
            tpot_p50_ms=percentile(tpot_ms, 0.5),
            tpot_p99_ms=percentile(tpot_ms, 0.99),
            hit_share=sum(c.prefix_cache_hits for c in counters) / sum(c.prefix_cache_queries for c in counters),
            busy_max_to_mean=max(busy_ms) / mean(busy_ms),
            core_us_per_step=core_us / fleet.num_steps,
            core_us_per_row=core_us / fleet.num_row_steps,
            core_us_per_request=core_us / len(ttft_ms),
        )

    def cells(self) -> list[str]:
        """Return the row of a table under HEAD."""
        return [
            f"{self.output_tokens_per_s:.0f}",
            f"{self.good_per_s:.1f}",
            f"{self.ttft_p50_ms:.0f}",
            f"{self.ttft_p99_ms:.0f}",
            f"{self.tpot_p50_ms:.1f}",
            f"{self.tpot_p99_ms:.1f}",
            f"{100 * self.hit_share:.0f} %",
            f"{self.busy_max_to_mean:.2f}",
            f"{self.core_us_per_step:.0f}",
            f"{self.core_us_per_row:.2f}",
            f"{self.core_us_per_request:.0f}",
        ]


HEAD = [
    "policy",
    "tokens/s",
    "goodput/s",
    "TTFT p50 ms",
    "p99",
    "TPOT p50 ms",
    "p99",
    "hits",
    "busy max/mean",
    "core us/step",
    "us/row",
    "us/request",
]


def simulate(settings: SimulateSettings, rate: float, seed: int) -> dict[Spread, Figures]:
    """Simulate each policy on the same requests and print a table."""
    figures: dict[Spread, Figures] = {}
    for spread in map(Spread, settings.policies.split(",")):
        fleet = Fleet(settings.workers, spread, seed)
        begin_s = time.process_time()
        fleet.run(make_requests(settings, rate, seed))
        figures[spread] = Figures.of(fleet)
        say(f"{spread.value}: simulated in {time.process_time() - begin_s:.0f} s of CPU time")
    say(f"\n{settings.workers} workers, {settings.requests} requests, {rate:g} a second for each worker")
    say(table([HEAD, *([spread.value, *each.cells()] for spread, each in figures.items())]))
    if own := figures.get(Spread.PREFIX_AWARE):
        say(f"one core of this machine drives {3e4 / own.core_us_per_step:.0f} such workers at steps of 30 ms\n")
    return figures


def measure(settings: SimulateSettings) -> list[Finding]:
    """Simulate each rate, with another workload at each repeat. Throughput is judged only at a second, higher rate."""
    collect_rarely()
    rates = [float(rate) for rate in settings.rates.split(",")]
    seeds = [settings.seed + i for i in range(settings.repeats or 1)]
    by_rate = {rate: [simulate(settings, rate, seed) for seed in seeds] for rate in rates}
    pair = Spread.PREFIX_AWARE, Spread.ROUND_ROBIN
    if any(spread not in by_rate[rates[0]][0] for spread in pair):
        return []
    easy = [(each[pair[0]], each[pair[1]]) for each in by_rate[min(rates)]]
    hard = [(each[pair[0]], each[pair[1]]) for each in by_rate[max(rates)]]
    ttft = [other.ttft_p99_ms / own.ttft_p99_ms for own, other in easy]
    findings = [at_least("round robin's time to first token, p99, against prefix-aware", ttft, 1.0)]
    if len(by_rate) == 1:
        return findings
    throughput = [own.output_tokens_per_s / other.output_tokens_per_s for own, other in hard]
    return [*findings, at_least("prefix-aware throughput against round robin, saturated", throughput, 1.1)]


if __name__ == "__main__":
    flags = CliApp.run(SimulateSettings)
    conclude(measure(flags), flags)
