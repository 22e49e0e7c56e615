"""Prometheus metrics: the gateway's own, and the cell's.

What vLLM has too is there under its name, so that people's dashboards work, and under Quire's: `quire_` in place of
`vllm:`. The cell's figures are asked of the scheduler at scrape time. While it is away the gateway's own are still
served.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protos import common_pb2, scheduler_pb2

# A series with the time of birth for each counter would double the page.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types for it

# vLLM's own buckets, in seconds.
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_VLLM = "vllm:"
_VLLM_ALIAS = "vllm:gpu_cache_usage_perc"  # an older name, for older dashboards
_FINISHED_REASONS = ("stop", "length", "abort", "error")
_FORMATS = [name.removeprefix("KV_FORMAT_").lower() for name in common_pb2.KvFormat.keys()]  # noqa: SIM118  # it is not a mapping


class RequestMetrics:
    """Latencies and counts of the requests that this gateway answers, as it sees them."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ["model_name"]

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(model_name)

        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "From a request to a choice's first token.", _TTFT_BUCKETS
        )
        self._inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice.", _INTER_TOKEN_BUCKETS
        )
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From a request to its end.", _REQUEST_BUCKETS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens submitted, cached ones included.")
        self._output_tokens = counter("vllm:generation_tokens", "Output tokens that this gateway received.")
        finished = Counter(
            "vllm:request_success", "Choices that ended.", [*labels, "finished_reason"], registry=registry
        )
        self._finished = {reason: finished.labels(model_name, reason) for reason in _FINISHED_REASONS}
        self._open = Gauge("quire_gateway_requests_open", "Requests being answered.", labels, registry=registry).labels(
            model_name
        )

    def submitted(self, num_prompt_tokens: int) -> None:
        """Count a request on its way to the scheduler."""
        self._open.inc()
        self._prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, last_token_s: float | None, start_s: float, now_s: float, num_tokens: int) -> None:
        """Count tokens that a choice got at `now_s`, after those at `last_token_s` (None: they are its first)."""
        if not num_tokens:
            return
        self._output_tokens.inc(num_tokens)
        if last_token_s is None:
            self._ttft.observe(now_s - start_s)
            return
        for _ in range(num_tokens):
            self._inter_token.observe((now_s - last_token_s) / num_tokens)

    def finish(self, reason: str) -> None:
        """Count the end of a choice."""
        self._finished[reason].inc()

    def end(self, seconds: float, num_unfinished: int, failed: bool) -> None:
        """Count the end of a request that took `seconds`; its unfinished choices failed, or the client left them."""
        self._open.dec()
        self._latency.observe(seconds)
        self._finished["error" if failed else "abort"].inc(num_unfinished)


class CellCollector(Collector):
    """The cell's figures, as the scheduler stated them last."""

    def __init__(self) -> None:
        self.model_name = ""  # until it is known
        self.stats: scheduler_pb2.CellStats | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the cell; without figures only that there are none."""
        stats = self.stats
        yield self._gauge("quire_scheduler_up", "1 when the scheduler answers this gateway.", float(stats is not None))
        if stats is None:
            return
        yield from self._totals(stats)
        yield self._gauge("vllm:num_requests_running", "Sequences that are being computed.", stats.num_running_seqs)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a worker.", stats.num_waiting_seqs)
        num_serving = sum(not lane.draining for lane in stats.lanes)
        usage = _kv_usage(stats.lanes)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that sequences hold, 0 to 1.", usage)
        yield self._gauge(_VLLM_ALIAS, "The older name of vllm:kv_cache_usage_perc.", usage)
        yield self._gauge("quire_workers", "Workers that take requests.", num_serving)
        yield self._gauge("quire_scheduler_uptime_seconds", "Since the scheduler started.", stats.uptime_ms / 1000)
        yield from _lane_metrics(stats.lanes)
        if stats.HasField("shared_index"):
            yield from self._shared_index(stats.shared_index)

    def _totals(self, stats: scheduler_pb2.CellStats) -> Iterator[Metric]:
        for name, text, value in (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries_total,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits_total),
            ("vllm:num_preemptions", "Sequences that gave up their blocks.", stats.num_preemptions_total),
            ("quire_computed_prompt_tokens", "Prompt tokens that workers computed.", stats.num_prompt_tokens_total),
            ("quire_output_tokens", "Output tokens of the whole cell.", stats.num_output_tokens_total),
            ("quire_steps", "Steps that workers ran.", stats.num_steps_total),
            ("quire_evicted_blocks", "Cached blocks that were overwritten.", stats.num_evicted_blocks_total),
            (
                "quire_demoted_blocks",
                "Blocks put in a narrower format because of their age.",
                stats.num_demoted_blocks_total,
            ),
            (
                "quire_pressed_blocks",
                "Blocks narrowed beyond their age because room was short.",
                stats.num_pressed_blocks_total,
            ),
            ("quire_moved_blocks", "Blocks put elsewhere to empty a slab.", stats.num_moved_blocks_total),
            ("quire_worker_losses", "Workers that were lost.", stats.num_worker_losses_total),
        ):
            metric = CounterMetricFamily(name, text, labels=["model_name"])
            metric.add_metric([self.model_name], value)
            yield metric
        refused = CounterMetricFamily(
            "quire_refused_calls", "Calls between services that were refused.", labels=["model_name", "reason"]
        )
        for reason, value in sorted(stats.num_refused_calls_total.items()):
            refused.add_metric([self.model_name, reason], value)
        yield refused

    def _shared_index(self, index: scheduler_pb2.SharedIndexStats) -> Iterator[Metric]:
        """Yield the metrics of the prefix index in Redis; there are none where none is configured."""
        name = "quire_prefix_index"
        yield self._gauge(f"{name}_up", "1 when Redis answers and takes writes.", float(index.up))
        yield self._gauge(f"{name}_live_workers", "Workers of all cells.", index.num_live_instances)
        yield self._gauge(f"{name}_live_cells", "Cells that share the index.", index.num_live_cells)
        yield self._gauge(f"{name}_pending_writes", "Blocks still to be written.", index.num_pending_writes)
        for suffix, text, value in (
            ("writes", "Blocks written.", index.num_writes_total),
            ("republishes", "Times that every block was published again.", index.num_republishes_total),
            ("outages", "Times that Redis failed.", index.num_outages_total),
            ("lookups", "Look-ups of waiting requests.", index.num_lookups_total),
            ("failed_lookups", "Look-ups without an answer in time.", index.num_failed_lookups_total),
            ("lookup_seconds", "Time that look-ups took.", index.lookup_ms_total / 1000),
            ("longer_elsewhere", "Look-ups that found more in another cell.", index.num_longer_elsewhere_total),
            ("stale_hints", "Claims that were false, or a dead worker's.", index.num_stale_hints_total),
        ):
            metric = CounterMetricFamily(f"{name}_{suffix}", text, labels=["model_name"])
            metric.add_metric([self.model_name], value)
            yield metric

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        metric = GaugeMetricFamily(name, text, labels=["model_name"])
        metric.add_metric([self.model_name], value)
        return metric


def _kv_usage(lanes: Sequence[scheduler_pb2.LaneStats]) -> float:
    num_blocks = sum(lane.num_blocks for lane in lanes)
    num_available = sum(lane.num_free_blocks + lane.num_cached_blocks for lane in lanes)
    return 1 - num_available / num_blocks if num_blocks else 0.0


def _lane_metrics(lanes: Sequence[scheduler_pb2.LaneStats]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("quire_kv_blocks", "KV blocks of a worker, by state.", labels=["worker", "state"])
    formats = GaugeMetricFamily(
        "quire_kv_format_blocks", "Blocks that sequences hold, by format.", labels=["worker", "format"]
    )
    slots = GaugeMetricFamily("quire_kv_slots", "Token slots of decoding sequences.", labels=["worker", "state"])
    running = GaugeMetricFamily("quire_worker_running_seqs", "Sequences on a worker.", labels=["worker"])
    in_flight = GaugeMetricFamily("quire_worker_steps_in_flight", "Steps sent and not answered.", labels=["worker"])
    step = GaugeMetricFamily("quire_worker_last_step_seconds", "Duration of the last step.", labels=["worker"])
    for lane in lanes:
        worker = lane.address
        num_idle = lane.num_free_blocks + lane.num_cached_blocks + lane.num_quarantined_blocks
        blocks.add_metric([worker, "free"], lane.num_free_blocks)
        blocks.add_metric([worker, "cached"], lane.num_cached_blocks)
        blocks.add_metric([worker, "quarantined"], lane.num_quarantined_blocks)
        blocks.add_metric([worker, "referenced"], max(0, lane.num_blocks - num_idle))
        for name, num_blocks in zip(_FORMATS, lane.num_referenced_blocks, strict=False):
            formats.add_metric([worker, name], num_blocks)
        slots.add_metric([worker, "allocated"], lane.num_allocated_slots)
        slots.add_metric([worker, "used"], lane.num_used_slots)
        running.add_metric([worker], lane.num_running_seqs)
        in_flight.add_metric([worker], lane.num_steps_in_flight)
        step.add_metric([worker], lane.last_step_ms / 1000)
    yield from (blocks, formats, slots, running, in_flight, step)


class BothNames(Collector):
    """What a registry collects, and under Quire's name whatever has vLLM's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        for metric in self._registry.collect():
            yield metric
            if metric.name.startswith(_VLLM) and metric.name != _VLLM_ALIAS:
                ours = Metric(_own_name(metric.name), metric.documentation, metric.type)
                ours.samples = [sample._replace(name=_own_name(sample.name)) for sample in metric.samples]
                yield ours


def _own_name(name: str) -> str:
    return "quire_" + name.removeprefix(_VLLM)


class Metrics:
    """All that `GET /metrics` shows."""

    def __init__(self) -> None:
        self._registry, self._page = CollectorRegistry(), CollectorRegistry()
        self._page.register(BothNames(self._registry))
        self._cell = CellCollector()
        self._registry.register(self._cell)
        self._requests: RequestMetrics | None = None
        self.refused_keys = Counter(
            "quire_gateway_refused_keys", "Requests without an API key that is known.", registry=self._registry
        )

    def for_model(self, model_name: str) -> RequestMetrics:
        """Return where requests are counted. The first call, when a worker has registered, fixes the model's name."""
        if self._requests is None:
            self._cell.model_name = model_name
            self._requests = RequestMetrics(self._registry, model_name)
        return self._requests

    def render(self, stats: scheduler_pb2.CellStats | None) -> bytes:
        """Return the page, with the cell's figures where there are any."""
        self._cell.stats = stats
        return generate_latest(self._page)
