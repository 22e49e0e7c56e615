"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.4): the angles by which positions turn channels."""

import math

import torch
from torch import Tensor

from worker_svc.models.config import LinearScaling, Llama3Scaling, RopeConfig


def inverse_frequencies(head_size: int, rope: RopeConfig) -> Tensor:
    """Return the angle per position of each pair of channels: float32 [head_size / 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / (rope.theta**exponents)
    if isinstance(rope.scaling, LinearScaling):
        return frequencies / rope.scaling.factor
    if isinstance(rope.scaling, Llama3Scaling):
        return _llama3(frequencies, rope.scaling)
    return frequencies


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return frequencies as the Llama 3.1 release scales them, by how often a wave fits the original context."""
    waves = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = smooth.clamp(0.0, 1.0)  # 1: short waves, as they are; 0: long ones, divided
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


class Rotary:
    """Tables of the cosines and sines of every position that the model knows, float32.

    They are small beside the model's weights. Angles computed at every step cost more than all else between
    products: torch hands even a few cosines to a library that wakes its threads.
    """

    def __init__(self, head_size: int, rope: RopeConfig, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(head_size, rope))
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)
        self.table_bytes = self._cos.nbytes + self._sin.nbytes

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each float32 [T, head_size / 2], of int64 positions [T].

        Raises IndexError, on CPUs, for a position that the model does not know.
        """
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
