"""`bench.gpu`, part 2: the worker's engine on a model of random weights made on the device, with and without graphs.

Steps go through `StepRunner` as the scheduler sends them: deltas, mirror, batch, forward, sampling, result. A step's
time is the host's, from request to result.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from bench.gpu_device import Bench, Ceilings
from kernels.formats import PLACES_PER_SLAB, Format, entry
from protos import common_pb2
from protos import worker_pb2 as pb
from worker_svc.arena_plan import plan_arena
from worker_svc.compute import ModelCompute
from worker_svc.engine import GpuBuilder, KVWish, StepLimits
from worker_svc.entries import EntryBounds
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.step import StepRunner
from worker_svc.torch_sampler import TorchSampler

_WEIGHT_SPREAD = 0.02


class RandomWeights:
    """A checkpoint of random weights, drawn on the device when they are read."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._device = device
        self._shapes = dict(_tensor_shapes(config))

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return self._shapes

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; norm weights are 1."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device).normal_(0.0, _WEIGHT_SPREAD)


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "lm_head.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer_idx in range(config.num_layers):
        prefix = f"model.layers.{layer_idx}."
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        for name in ("gate", "up"):
            yield f"{prefix}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)


@dataclass(frozen=True, slots=True)
class EngineTime:
    """One load on the engine."""

    name: str
    tokens_per_s: float
    step_ms: float
    floor_ms: float

    def cells(self) -> tuple[str, ...]:
        """Return it as a row of a table."""
        ratio = self.step_ms / self.floor_ms
        return self.name, f"{self.tokens_per_s:.0f}", f"{self.step_ms:.3f}", f"{self.floor_ms:.3f}", f"{ratio:.2f}"


ENGINE_HEADER = ("engine", "tokens/s", "step ms", "floor ms", "ms / floor")


class Engine:
    """A worker's engine without its services."""

    def __init__(self, config: ModelConfig, limits: StepLimits, buckets: tuple[int, ...], bench: Bench) -> None:
        self.config, self.limits = config, limits
        self._buckets = buckets
        self._decoder = Decoder.load(config, RandomWeights(config, bench.device), torch.bfloat16, bench.device)
        self._sampler = TorchSampler(config.vocab_size, bench.device)
        wish = KVWish(None, 0.9, (Format.NATIVE,))
        self._builder = GpuBuilder(self._decoder, bench.backend(), limits, wish, bench.parts(limits))
        budget_bytes = self._builder.arena_bytes(self._sampler, buckets)
        self.plan = plan_arena(budget_bytes, config.num_layers, lambda blocks: self._decoder.layout(16, blocks))
        self._compute: ModelCompute = self._builder.build(self.plan, ())

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads: all weights but the embedding's."""
        return self._decoder.weight_bytes - 2 * self.config.vocab_size * self.config.hidden_size

    def record_graphs(self) -> None:
        """Run decode steps by graphs from now on."""
        self._builder.record(self._compute, self._buckets)

    def runner(self) -> StepRunner:
        """Return a runner without rows."""
        limits = MirrorLimits(
            max_num_seqs=self.limits.max_num_seqs,
            max_model_len=self.limits.max_model_len,
            block_size=self.limits.block_size,
            vocab_size=self.config.vocab_size,
            entries=EntryBounds(self.plan.num_slabs, self.plan.places_per_slab),
        )
        return StepRunner(Mirror(limits), self._compute, self._sampler)

    def new_rows(self, num_rows: int, num_tokens: int, room_tokens: int, top_p: float) -> list[pb.NewRow]:
        """Return rows of random prompts, each with blocks for `room_tokens` more; greedy where `top_p` is 1."""
        random = np.random.default_rng(num_rows)
        blocks = -(-(num_tokens + room_tokens) // self.limits.block_size)
        sampling = common_pb2.SamplingParams(
            temperature=0.0 if top_p == 1.0 else 0.8, top_p=top_p, repetition_penalty=1.0
        )
        return [
            pb.NewRow(
                seq_id=row,
                token_ids=random.integers(0, self.config.vocab_size, num_tokens).tolist(),
                num_prompt_tokens=num_tokens,
                entries=[self._entry(idx) for idx in range(row * blocks, (row + 1) * blocks)],
                num_scheduled_tokens=num_tokens,
                sampling=sampling,
            )
            for row in range(num_rows)
        ]

    def _entry(self, block_idx: int) -> int:
        slab_idx, place = divmod(block_idx, self.plan.layout.slab_blocks)
        return entry(slab_idx * PLACES_PER_SLAB + place, Format.NATIVE)

    # ---- loads

    def decode(
        self, num_rows: int, context_len: int, num_steps: int, ceilings: Ceilings, top_p: float = 1.0
    ) -> tuple[EngineTime, list[int]]:
        """Decode rows of equal contexts; return the figures, and the last step's tokens."""
        runner = self.runner()
        rows = self.new_rows(num_rows, context_len, num_steps + 1, top_p)
        for chunk in self._fitting(rows, context_len):
            run_step(runner, pb.StepRequest(new_rows=chunk))
        continued = pb.ContinuedRows(seq_ids=range(num_rows))
        times, tokens = [], []
        for _ in range(num_steps):
            begin_s = time.perf_counter()
            result = run_step(runner, pb.StepRequest(continued=continued))
            times.append(1e3 * (time.perf_counter() - begin_s))
            tokens = list(result.sampled.token_ids)
        step_ms = median(times[num_steps // 4 :])
        token_bytes = self.plan.layout.block_bytes(Format.NATIVE) // self.limits.block_size * self.config.num_layers
        kv_bytes = num_rows * (context_len + num_steps) * token_bytes
        flops = num_rows * self.weight_bytes  # two for each of a weight's two bytes
        floor_s = max((self.weight_bytes + kv_bytes) / ceilings.bytes_per_s, flops / ceilings.flops_per_s)
        name = f"decode, {num_rows} x {context_len}" + ("" if top_p == 1.0 else f", top-p {top_p:g}")
        return EngineTime(name, 1e3 * num_rows / step_ms, step_ms, 1e3 * floor_s), tokens

    def prefill(self, num_rows: int, num_tokens: int, repeats: int, ceilings: Ceilings) -> EngineTime:
        """Compute the prompts of rows in one step."""
        times = []
        for repeat in range(repeats + 1):
            runner = self.runner()
            request = pb.StepRequest(new_rows=self.new_rows(num_rows, num_tokens, 1, 1.0))
            begin_s = time.perf_counter()
            run_step(runner, request)
            times.append(1e3 * (time.perf_counter() - begin_s) if repeat else 0.0)
        step_ms = median(times[1:])
        attention = 2 * self.config.num_layers * self.config.num_heads * self.config.head_size * num_tokens**2
        flops = num_rows * (num_tokens * (self.weight_bytes - self._head_bytes) + self._head_bytes + attention)
        total = num_rows * num_tokens
        name = f"prefill, {num_rows} x {num_tokens}"
        return EngineTime(name, 1e3 * total / step_ms, step_ms, 1e3 * flops / ceilings.flops_per_s)

    @property
    def _head_bytes(self) -> int:
        return 2 * self.config.vocab_size * self.config.hidden_size

    def _fitting(self, rows: Sequence[pb.NewRow], num_tokens: int) -> Iterator[Sequence[pb.NewRow]]:
        """Return the rows in steps of as many tokens as a step computes."""
        size = max(1, self.limits.max_num_batched_tokens // num_tokens)
        for begin in range(0, len(rows), size):
            yield rows[begin : begin + size]


def run_step(runner: StepRunner, request: pb.StepRequest) -> pb.StepResult:
    """Run a step that must succeed."""
    result = runner.run(request)
    if result.status != pb.STEP_STATUS_OK or result.failed_rows:
        raise RuntimeError(f"the step failed: {result.error or result.failed_rows[0].error}")
    return result
