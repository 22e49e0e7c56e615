"""The decoder's work between matrix products and attention: norms, rotation, gating.

At 8 decoding rows a model of 30 layers makes hundreds of such small operations a step, and what counts is calls, not
arithmetic. So each operation is one fused call, most of them into buffers that the caller allocates once a step.
Compiled kernels do them on CPUs (`kernels/cpu/elementwise.py`) and on GPUs (`kernels/triton/elementwise.py`);
elsewhere torch.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Elementwise(Protocol):
    """All tensors are contiguous, T tokens first; what has an argument named `out` writes its result there."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight; all [T, H], weight [H].

        The norm is RMSNorm over the last dimension (Zhang and Sennrich 2019). `delta` and `out` have one dtype, which
        may be narrower than that of residual and weight.
        """

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Return heads [T, heads, D], the first `num_rotated` of them rotated.

        Channel i is paired with i + D / 2; cos and sin are float32 [T, D / 2]. On a CPU the result is float32, so that
        narrower heads are not rounded again; elsewhere it is in place of the heads.
        """

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up for gate_up [T, 2 I], gate first (SwiGLU: Shazeer 2020); out [T, I]."""


class TorchElementwise:
    """Plain torch for any device and dtype; norms and rotation are computed in float32.

    Each torch operation is a launch, and a pass over memory: so operations that torch fuses are used, and results are
    rounded as they are written, which costs no pass of its own. That makes 3 launches a norm, 4 a rotation, 2 a gate.
    """

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See Elementwise."""
        residual += delta
        out.copy_(F.rms_norm(residual, weight.shape, weight, eps))

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """See Elementwise; in place on every device."""
        left, right = heads[:, :num_rotated].chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        left_sin = left * sin
        torch.addcmul(left * cos, right, sin, value=-1, out=left)
        torch.addcmul(left_sin, right, cos, out=right)
        return heads

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """See Elementwise."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)


def elementwise_for(device: torch.device, product_dtype: torch.dtype) -> Elementwise:
    """Return the fastest implementation for a device, and for what matrix products take and give."""
    # Imported here: each loads a compiler that the other device has no need of.
    if device.type == "cpu":
        from kernels.cpu.elementwise import CpuElementwise

        return CpuElementwise(product_dtype)
    if device.type == "cuda":
        from kernels.triton.elementwise import TritonElementwise

        return TritonElementwise()
    return TorchElementwise()
