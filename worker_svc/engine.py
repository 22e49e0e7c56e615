"""From a loaded decoder to one that steps: memory for the arena, kernels compiled, step inputs, decode graphs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.dispatch import Backend
from kernels.formats import Format, KVLayout
from worker_svc.arena_plan import ArenaPlan, plan_arena
from worker_svc.compute import ModelCompute
from worker_svc.entries import max_row_blocks
from worker_svc.errors import StartupError
from worker_svc.gpu_errors import first_line
from worker_svc.gpu_memory import CudaMemoryProbe, MemoryProbe, measure_needs
from worker_svc.graphs import CudaGraphRecorder, DecodeGraphs, Recorder, decode_buckets
from worker_svc.kv import cpu_budget
from worker_svc.models.decoder import Decoder
from worker_svc.profiling import activation_bytes, decode_batch, prefill_batch, prefill_slabs
from worker_svc.sampler import Sampler, TokenSampler, demanding_rows
from worker_svc.staging import InputTransfer, PinnedInputs, batch_bytes
from worker_svc.torch_sampler import TorchSampler

logger = logging.getLogger(__name__)

_NUM_MEASURED = 2  # graphs


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step may be."""

    max_num_seqs: int  # rows
    max_num_batched_tokens: int
    max_model_len: int  # tokens of a row
    block_size: int  # tokens of a block

    @property
    def max_rows(self) -> int:
        """Rows of a step: each computes one token at least."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens of a step: no row has more of them than the longest sequence."""
        return min(self.max_num_batched_tokens, self.max_rows * self.max_model_len)

    @property
    def max_blocks(self) -> int:
        """Entries of a row's table."""
        return max_row_blocks(self.max_model_len, self.block_size)

    @property
    def input_bytes(self) -> int:
        """Bytes of the largest step's arrays, packed."""
        return batch_bytes(self.max_tokens, self.max_rows, self.max_blocks)


@dataclass(frozen=True, slots=True)
class KVWish:
    """What the person who starts a worker says of its KV."""

    kv_cache_memory: int | None  # bytes of the arena; None: what there is
    gpu_memory_utilization: float  # share of a GPU, 0 to 1
    formats: tuple[Format, ...] = tuple(Format)  # that blocks may have


def parse_formats(names: str) -> tuple[Format, ...]:
    """Return the formats of a list of names, native always among them; `all` stands for every one."""
    wanted = {"native", *names.split(",")}
    return tuple(fmt for fmt in Format if "all" in wanted or fmt.name.lower() in wanted)


def make_sampler(vocab_size: int, device: torch.device) -> TokenSampler:
    """Return the sampler that works where the logits are."""
    return Sampler(vocab_size) if device.type == "cpu" else TorchSampler(vocab_size, device)


def make_cpu_compute(decoder: Decoder, backend: Backend, limits: StepLimits, wish: KVWish) -> ModelCompute:
    """Return a compute in main memory, its kernels compiled. Raises OutOfMemoryAtStartError."""
    reserve_bytes = activation_bytes(decoder.config, limits.max_tokens, limits.max_rows)
    plan = _plan(cpu_budget(wish.kv_cache_memory, reserve_bytes), decoder, limits)
    backend.warm_up(plan.layout, decoder.config.num_heads, decoder.attention_params, wish.formats)
    return ModelCompute(decoder, backend, plan, plan.allocate(decoder.device))


def make_gpu_compute(
    decoder: Decoder,
    backend: Backend,
    sampler: TokenSampler,
    limits: StepLimits,
    wish: KVWish,
    buckets: tuple[int, ...],
) -> ModelCompute:
    """Return a compute on the decoder's GPU, its kernels compiled, with graphs of decode steps of these many rows.

    Raises OutOfMemoryAtStartError, or StartupError when not even the largest step fits.
    """
    builder = GpuBuilder(decoder, backend, limits, wish, GpuParts.of(decoder.device, limits))
    budget_bytes = builder.arena_bytes(sampler, buckets)
    return builder.build(_plan(budget_bytes, decoder, limits), buckets)


def gpu_buckets(limits: StepLimits, enforce_eager: bool) -> tuple[int, ...]:
    """Return the numbers of rows whose decode steps get graphs; none where all is to be launched."""
    return () if enforce_eager else decode_buckets(limits.max_rows)


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What building takes of a GPU besides torch's own operations."""

    inputs: InputTransfer
    probe: MemoryProbe
    make_recorder: Callable[[], Recorder]

    @classmethod
    def of(cls, device: torch.device, limits: StepLimits) -> "GpuParts":
        """Return those of a GPU. All recorders share a stream, for libraries keep a work space for each."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        inputs = PinnedInputs.on_gpu(limits.input_bytes, device)
        return cls(inputs, CudaMemoryProbe(device), partial(CudaGraphRecorder, stream))


class GpuBuilder:
    """Sizes a GPU's arena, then makes the compute on it. All that it makes shares one way for a step's inputs."""

    def __init__(self, decoder: Decoder, backend: Backend, limits: StepLimits, wish: KVWish, parts: GpuParts) -> None:
        self._decoder = decoder
        self._backend = backend
        self._limits = limits
        self._wish = wish
        self._parts = parts

    def arena_bytes(self, sampler: TokenSampler, buckets: tuple[int, ...]) -> int:
        """Run the largest steps and record a few graphs on a small arena; return the bytes that the real one may take.

        Raises OutOfMemoryAtStartError or StartupError.
        """
        decoder, limits, wish = self._decoder, self._limits, self._wish
        layout = decoder.layout(limits.block_size)
        num_slabs = prefill_slabs(limits.max_tokens, limits.max_rows, limits.max_model_len, layout)
        plan = ArenaPlan(decoder.config.num_layers, num_slabs, layout)
        # All layers share the bytes of one: what they hold does not matter here.
        one_layer = ArenaPlan(1, num_slabs, layout).allocate(decoder.device)
        arena = one_layer.expand(plan.num_layers, -1, -1)
        self._warm_up(layout)
        compute = ModelCompute(decoder, self._backend, plan, arena, self._parts.inputs)
        graphs = self._empty_graphs(buckets)
        # The largest brings the pool that all share, the next what each takes besides.
        records = [
            partial(compute.record_graph, graphs, bucket) for bucket in sorted(buckets, reverse=True)[:_NUM_MEASURED]
        ]
        try:
            needs = measure_needs(
                self._parts.probe,
                partial(_run_largest_steps, compute, sampler, limits),
                one_layer.nbytes,
                records,
                len(buckets),
            )
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"a step of {limits.max_tokens} tokens and {limits.max_rows} rows does not fit beside the "
                f"weights: lower --max-num-batched-tokens or --max-num-seqs ({first_line(error)})"
            ) from error
        logger.info(
            "of the GPU's %d bytes %d are for weights and the largest step, %d for graphs, and %d are held by others",
            needs.total_bytes,
            needs.peak_bytes,
            needs.graph_bytes,
            needs.foreign_bytes,
        )
        return needs.arena_bytes(wish.gpu_memory_utilization, wish.kv_cache_memory)

    def build(self, plan: ArenaPlan, buckets: tuple[int, ...]) -> ModelCompute:
        """Return the compute on an arena of its own, with its graphs recorded. Raises StartupError."""
        self._parts.probe.release_cached()
        try:
            arena = plan.allocate(self._decoder.device)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"a KV arena of {plan.num_bytes:,} bytes cannot be had in one piece: lower --gpu-memory-utilization "
                f"({first_line(error)})"
            ) from error
        self._warm_up(plan.layout)
        compute = ModelCompute(self._decoder, self._backend, plan, arena, self._parts.inputs)
        if buckets:
            self.record(compute, buckets)
        return compute

    def record(self, compute: ModelCompute, buckets: tuple[int, ...]) -> None:
        """Record a built compute's graphs, in place of those that it may have."""
        compute.record_graphs(self._empty_graphs(buckets), buckets)

    def _warm_up(self, layout: KVLayout) -> None:
        decoder = self._decoder
        self._backend.warm_up(layout, decoder.config.num_heads, decoder.attention_params, self._wish.formats)

    def _empty_graphs(self, buckets: tuple[int, ...]) -> DecodeGraphs:
        return DecodeGraphs(
            self._parts.make_recorder(),
            self._parts.inputs,
            max(buckets, default=0),
            self._limits.max_blocks,
            self._decoder.device,
        )


def _run_largest_steps(compute: ModelCompute, sampler: TokenSampler, limits: StepLimits) -> None:
    """Run the most tokens in the most rows with the widest tables, and that sample all that there is; then decodes.

    These take less, but libraries load other kernels for them.
    """
    layout, num_rows, width = compute.plan.layout, limits.max_rows, limits.max_blocks
    largest = prefill_batch(limits.max_tokens, num_rows, limits.max_model_len, width, layout)
    for batch in (largest, decode_batch(num_rows, width, layout)):
        sampler.sample(compute.forward(batch), demanding_rows(num_rows))


def _plan(budget_bytes: int, decoder: Decoder, limits: StepLimits) -> ArenaPlan:
    return plan_arena(budget_bytes, decoder.config.num_layers, lambda blocks: decoder.layout(limits.block_size, blocks))
