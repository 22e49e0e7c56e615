"""Which device computes, and in which dtype: what the person asked for, on the GPUs that torch sees."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from worker_svc.errors import StartupError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

_OLDEST_CAPABILITY = (8, 0)  # Ampere; older chips have too little shared memory for the kernels, and no bfloat16


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    capability: tuple[int, int]  # NVIDIA: compute capability; AMD: the version of its instruction set
    is_amd: bool = False

    @property
    def is_supported(self) -> bool:
        """Whether the kernels run on it."""
        return self.is_amd or self.capability >= _OLDEST_CAPABILITY

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


def is_named(wish: str) -> bool:
    """Return whether `--device` names a device, rather than leave the choice between a GPU and the CPU."""
    return not wish.startswith("auto")


def choose_device(wish: str, gpus: Sequence[Gpu]) -> torch.device:
    """Return the device for `--device`: cpu, cuda (the first GPU), cuda:N, or auto and auto:N.

    Raises StartupError when a GPU is asked for that is not there, or too old. auto passes by what is too old, and
    takes the CPU where there is no GPU at all.
    """
    if wish == "cpu" or not (gpus or is_named(wish)):
        return CPU
    idx = int(found.group()) if (found := re.search(r"\d+$", wish)) else 0
    if not gpus:
        built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = "" if built_for_gpus else f": torch {torch.__version__} was built without CUDA"
        raise StartupError(f"--device {wish}: this machine has no GPU that torch can use{why}")
    if idx >= len(gpus):
        raise StartupError(
            f"--device {wish}: torch sees {len(gpus)} GPUs here, the last is cuda:{len(gpus) - 1} (each of several "
            "--workers takes one, unless --device names one for all)"
        )
    if not gpus[idx].is_supported:
        why = f"{gpus[idx]} is too old, the kernels need compute capability 8.0 (Ampere) or above"
        if is_named(wish):
            raise StartupError(f"--device {wish}: {why}")
        logger.warning("computing on the CPU, though there is a GPU: %s", why)
        return CPU
    return torch.device("cuda", idx)


def choose_dtype(wish: str) -> torch.dtype:
    """Return the compute dtype for `--dtype`; auto is bfloat16."""
    dtype: torch.dtype = torch.bfloat16 if wish == "auto" else getattr(torch, wish)
    return dtype


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current one: launches and streams go there, and each thread has its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
