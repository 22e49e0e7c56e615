"""From settings to a worker that could run a step: model, arena and kernels, in that order."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.dispatch import Backend, backend_for
from kernels.errors import UnsupportedDeviceError
from kernels.formats import Format
from protos.common_pb2 import ModelInfo
from worker_svc.arena_plan import ArenaPlan
from worker_svc.compute import ModelCompute
from worker_svc.device import CPU, Gpu, choose_device, choose_dtype, find_gpus, is_named, use_device
from worker_svc.engine import (
    KVWish,
    StepLimits,
    gpu_buckets,
    make_cpu_compute,
    make_gpu_compute,
    make_sampler,
    parse_formats,
)
from worker_svc.entries import EntryBounds
from worker_svc.errors import StartupError
from worker_svc.gpu_errors import told_in_one_line
from worker_svc.kv import check_weights_fit
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.fingerprint import fingerprint
from worker_svc.loader.folder import CONFIG_FILE, GENERATION_CONFIG_FILE
from worker_svc.loader.resolve import resolve_model
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.profiling import prefill_batch
from worker_svc.sampler import TokenSampler
from worker_svc.settings import WorkerSettings
from worker_svc.step import StepRunner

logger = logging.getLogger(__name__)

# While a chunk is computed, streams stand still: on two cores 0.3 s at 256 tokens and 0.6 s at 512, at the same rate of
# tokens; below 256 it falls.
_DEFAULT_STEP_TOKENS = {"cpu": 256, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """All that a worker has before it listens."""

    runner: StepRunner
    plan: ArenaPlan
    places_per_slab: dict[Format, int]  # blocks of each format that it takes
    model: ModelInfo
    max_num_seqs: int  # rows a step
    max_num_batched_tokens: int  # a step


@told_in_one_line()
def load_worker(settings: WorkerSettings) -> LoadedWorker:
    """Load the model, allocate the arena, compile every kernel, record graphs; this thread then runs the steps.

    Raises StartupError, or the error of the part that refuses (models, loader, kernels): each is one line for a person.
    """
    device, backend = _device_and_backend(settings.device, find_gpus())
    dtype = choose_dtype(settings.dtype)
    folder = resolve_model(settings.model, logger.info)
    config = read_config(folder)
    limits = StepLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens or _DEFAULT_STEP_TOKENS[device.type],
        max_model_len=_max_model_len(settings, config),
        block_size=settings.block_size,
    )
    decoder = _load_decoder(folder, config, dtype, device)
    sampler = make_sampler(config.vocab_size, device)
    logger.info("loading kernels; the first time they are compiled")
    sampler.warm_up()
    wish = KVWish(settings.kv_cache_memory, settings.gpu_memory_utilization, parse_formats(settings.kv_formats))
    compute = _make_compute(settings, decoder, backend, sampler, limits, wish)
    compute.forward(prefill_batch(1, 1, 1, 1, compute.plan.layout))
    plan = compute.plan
    logger.info("weights take %d bytes, KV %d: %d tokens", decoder.weight_bytes, plan.num_bytes, plan.num_tokens)

    places_per_slab = {fmt: plan.places_per_slab[fmt] for fmt in wish.formats}
    mirror_limits = MirrorLimits(
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        vocab_size=config.vocab_size,
        entries=EntryBounds(plan.num_slabs, places_per_slab),
        eos_token_ids=config.eos_token_ids,
    )
    model = ModelInfo(
        name=folder.name,
        fingerprint=fingerprint(folder),
        max_model_len=limits.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        block_size=limits.block_size,
        dtype=_name(decoder.dtype),
        kv_cache_dtype=plan.layout.native_dtype,
    )
    runner = StepRunner(Mirror(mirror_limits), compute, sampler)
    return LoadedWorker(runner, plan, places_per_slab, model, limits.max_num_seqs, limits.max_num_batched_tokens)


def _device_and_backend(wish: str, gpus: Sequence[Gpu]) -> tuple[torch.device, Backend]:
    """Return where to compute, and what computes attention there; the calling thread works on it from now on."""
    device = choose_device(wish, gpus)
    try:
        backend = backend_for(device)
    except UnsupportedDeviceError as error:
        if is_named(wish) or device == CPU:
            raise
        logger.warning("computing on the CPU, though there is a GPU: %s", error)
        return CPU, backend_for(CPU)
    use_device(device)
    return device, backend


def _make_compute(
    settings: WorkerSettings,
    decoder: Decoder,
    backend: Backend,
    sampler: TokenSampler,
    limits: StepLimits,
    wish: KVWish,
) -> ModelCompute:
    if decoder.device.type == "cpu":
        return make_cpu_compute(decoder, backend, limits, wish)
    buckets = gpu_buckets(limits, settings.enforce_eager)
    return make_gpu_compute(decoder, backend, sampler, limits, wish, buckets)


def read_config(folder: Path) -> ModelConfig:
    """Return what a model folder says of its model. Raises StartupError, or the error of what a model may not be."""
    generation = folder / GENERATION_CONFIG_FILE
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
        generation_config = json.loads(generation.read_bytes()) if generation.is_file() else None
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read the model's config in {folder}: {error}") from error
    return ModelConfig.from_hf(config, generation_config)


def _max_model_len(settings: WorkerSettings, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > limit:
        raise StartupError(f"--max-model-len {settings.max_model_len}: the model was made for {limit} tokens")
    return settings.max_model_len or limit


def _load_decoder(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    checkpoint = Checkpoint(folder)
    check_weights_fit(config.num_parameters * dtype.itemsize, device)
    logger.info("loading %s as %s on %s", folder, _name(dtype), device)
    return Decoder.load(config, checkpoint, dtype, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
