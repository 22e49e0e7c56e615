"""Which device computes, and in which dtype: what the person asked for, on the GPUs that torch sees."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.errors import StartupError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

_BFLOAT16_CAPABILITY = (8, 0)  # Ampere; older chips compute it in float32, several times slower


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]  # NVIDIA: compute capability; AMD: the version of its instruction set
    is_amd: bool = False

    @property
    def computes_bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 run on its tensor cores."""
        return self.is_amd or self.capability >= _BFLOAT16_CAPABILITY

    def __str__(self) -> str:
        """Return the name as a person knows it."""
        return self.name if self.is_amd else f"{self.name} (sm_{self.capability[0]}{self.capability[1]})"


def find_gpus() -> list[Gpu]:
    """Return the GPUs that torch can use, by index; none where there is none, or torch was built for CPUs alone."""
    if not torch.cuda.is_available():
        return []
    is_amd = torch.version.hip is not None
    properties = [torch.cuda.get_device_properties(idx) for idx in range(torch.cuda.device_count())]
    return [Gpu(gpu.name, (gpu.major, gpu.minor), is_amd) for gpu in properties]


def choose_device(wish: str, gpus: Sequence[Gpu]) -> torch.device:
    """Return the device for `--device`: cpu, auto, cuda (the first GPU) or cuda:N. Raises StartupError."""
    if wish == "cpu" or (wish == "auto" and not gpus):
        return CPU
    idx = int(found.group()) if (found := re.search(r"\d+$", wish)) else 0
    if not gpus:
        built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = "" if built_for_gpus else f": torch {torch.__version__} was built without CUDA"
        raise StartupError(f"--device {wish}: this machine has no GPU that torch can use{why}")
    if idx >= len(gpus):
        raise StartupError(f"--device {wish}: torch sees {len(gpus)} GPUs here, the last is cuda:{len(gpus) - 1}")
    return torch.device("cuda", idx)


def choose_dtype(wish: str, device: torch.device, gpus: Sequence[Gpu]) -> torch.dtype:
    """Return the compute dtype for `--dtype`; auto is bfloat16, and float16 on a GPU that lacks it.

    Raises StartupError when bfloat16 is asked of a GPU that lacks it.
    """
    gpu = gpus[device.index] if device.type == "cuda" else None
    lacks_bfloat16 = gpu is not None and not gpu.computes_bfloat16
    if wish == "bfloat16" and lacks_bfloat16:
        raise StartupError(f"--dtype bfloat16: {gpu} does not compute it; float16 and float32 it does")
    if wish == "auto" and lacks_bfloat16:
        logger.info("computing in float16, for %s does not compute bfloat16", gpu)
        return torch.float16
    dtype: torch.dtype = torch.bfloat16 if wish == "auto" else getattr(torch, wish)
    return dtype


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current one: launches and streams go there, and each thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
