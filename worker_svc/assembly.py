"""From settings to a worker that could run a step: model, arena and kernels, in that order."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.dispatch import Backend, backend_for
from kernels.errors import UnsupportedDeviceError
from protos.common_pb2 import ModelInfo
from worker_svc.compute import ModelCompute
from worker_svc.entries import EntryBounds
from worker_svc.errors import StartupError
from worker_svc.kv import ArenaPlan, check_weights_fit, cpu_budget, gpu_budget, plan_arena
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.fingerprint import fingerprint
from worker_svc.loader.folder import CONFIG_FILE, GENERATION_CONFIG_FILE
from worker_svc.loader.resolve import resolve_model
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.profiling import activation_bytes, prefill_batch
from worker_svc.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step import StepRunner

logger = logging.getLogger(__name__)

_DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """All that a worker has before it listens."""

    runner: StepRunner
    plan: ArenaPlan
    model: ModelInfo
    max_num_seqs: int  # rows a step
    max_num_batched_tokens: int  # a step


def load_worker(settings: WorkerSettings) -> LoadedWorker:
    """Load the model, allocate the arena, compile every kernel.

    Raises StartupError, or the error of the part that refuses (models, loader, kernels): each is one line for a person.
    """
    device = _device(settings)
    backend = backend_for(device)
    folder = resolve_model(settings.model, logger.info)
    config = _read_config(folder)
    max_model_len = _max_model_len(settings, config)
    max_num_batched_tokens = settings.max_num_batched_tokens or _DEFAULT_STEP_TOKENS[device.type]
    decoder = _load_decoder(settings, folder, config, device)
    plan = _plan_arena(settings, decoder, backend, max_num_batched_tokens)
    compute = ModelCompute(decoder, backend, plan, plan.allocate(device))
    logger.info("weights take %d bytes, KV %d: %d tokens", decoder.weight_bytes, plan.num_bytes, plan.num_tokens)

    logger.info("loading kernels; the first time they are compiled")
    backend.warm_up(plan.layout, config.num_heads, decoder.attention_params)
    sampler = Sampler(config.vocab_size)
    sampler.warm_up()
    compute.forward(prefill_batch(1, 1, plan.layout))

    limits = MirrorLimits(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        vocab_size=config.vocab_size,
        entries=EntryBounds(plan.num_slabs, plan.places_per_slab),
        eos_token_ids=config.eos_token_ids,
    )
    model = ModelInfo(
        name=folder.name,
        fingerprint=fingerprint(folder),
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        block_size=settings.block_size,
        dtype=_name(decoder.dtype),
        kv_cache_dtype=plan.layout.native_dtype,
    )
    runner = StepRunner(Mirror(limits), compute, sampler)
    return LoadedWorker(runner, plan, model, settings.max_num_seqs, max_num_batched_tokens)


def _device(settings: WorkerSettings) -> torch.device:
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartupError("--device cuda: this machine has no GPU that torch can use")
    device = torch.device("cuda")
    if settings.device == "auto":
        try:
            backend_for(device)
        except UnsupportedDeviceError as error:
            logger.warning("computing on the CPU, though there is a GPU: %s", error)
            return torch.device("cpu")
    return device


def _read_config(folder: Path) -> ModelConfig:
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


def _load_decoder(settings: WorkerSettings, folder: Path, config: ModelConfig, device: torch.device) -> Decoder:
    dtype = torch.bfloat16 if settings.dtype == "auto" else getattr(torch, settings.dtype)
    checkpoint = Checkpoint(folder)
    stored_bytes = checkpoint.tensor(next(iter(checkpoint.names()))).element_size()
    check_weights_fit(checkpoint.total_bytes // stored_bytes * dtype.itemsize, device)
    logger.info("loading %s as %s on %s", folder, _name(dtype), device)
    return Decoder.load(config, checkpoint, dtype, device)


def _plan_arena(settings: WorkerSettings, decoder: Decoder, backend: Backend, max_num_batched_tokens: int) -> ArenaPlan:
    """Return the arena that memory allows. Raises OutOfMemoryAtStartError."""
    num_layers, num_rows = decoder.config.num_layers, min(settings.max_num_seqs, max_num_batched_tokens)

    def profile() -> None:
        layout = decoder.layout(settings.block_size)
        num_slabs = -(-max_num_batched_tokens // (layout.slab_blocks * layout.block_size))
        plan = ArenaPlan(num_layers, num_slabs, layout)
        compute = ModelCompute(decoder, backend, plan, plan.allocate(decoder.device))
        compute.forward(prefill_batch(max_num_batched_tokens, num_rows, layout))

    if decoder.device.type == "cpu":
        reserve_bytes = activation_bytes(decoder.config, max_num_batched_tokens, num_rows)
        budget = cpu_budget(settings.kv_cache_memory, reserve_bytes)
    else:
        budget = gpu_budget(settings.kv_cache_memory, settings.gpu_memory_utilization, decoder.device, profile)
    return plan_arena(budget, num_layers, lambda blocks: decoder.layout(settings.block_size, blocks))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
