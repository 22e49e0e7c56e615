"""The decoder's work between matrix products on a GPU: norms, rotation, gating, one launch each.

In torch's operations a layer makes 12 launches of this kind beside 7 others, each a pass over memory; for few rows the
launches alone take as long as reading the weights. Fused, there are 4. All is computed in float32 and rounded once, as
it is written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.tuning import COMPILER_OPTIONS

_GATE_TILE = 1024  # elements of a program
_ROTATE_TILE = 2048


@triton.jit
def add_norm_kernel(residual, delta, weight, out, eps, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Add a token's delta to its residual, and write the norm of the sum. Grid: tokens."""
    at = tl.arange(0, PAD)
    mask = at < SIZE
    begin = tl.program_id(0).to(tl.int64) * SIZE
    added = tl.load(residual + begin + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(delta + begin + at, mask=mask, other=0.0).to(tl.float32)
    # The norm is that of the sum as it is kept.
    kept = added.to(residual.dtype.element_ty)
    tl.store(residual + begin + at, kept, mask=mask)
    added = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(added * added, 0) / SIZE + eps)
    normed = added * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + begin + at, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rotate_kernel(
    heads, cos, sin, num_rotated, TOKEN: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, HEADS: tl.constexpr
):
    """Rotate HEADS heads of a token. Grid: tokens, groups of heads. TOKEN: elements of all of a token's heads."""
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF_PAD)
    is_channel = channel < HALF
    mask = (head < num_rotated)[:, None] & is_channel[None, :]
    cosine = tl.load(cos + token * HALF + channel, mask=is_channel, other=0.0)[None, :]
    sine = tl.load(sin + token * HALF + channel, mask=is_channel, other=0.0)[None, :]
    lefts = heads + token * TOKEN + (head * (2 * HALF))[:, None] + channel[None, :]
    left = tl.load(lefts, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(lefts + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(lefts, (left * cosine - right * sine).to(heads.dtype.element_ty), mask=mask)
    tl.store(lefts + HALF, (right * cosine + left * sine).to(heads.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Write silu(gate) * up for TILE channels of a token. Grid: tokens, tiles."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = channel < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + channel, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + channel, mask=mask, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * SIZE + channel, gated.to(out.dtype.element_ty), mask=mask)


class TritonElementwise:
    """The decoder's elementwise operations on contiguous tensors of any dtype, T tokens first."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual += delta, then out = residual / rms(residual) * weight; all [T, H], weight [H]."""
        num_tokens, size = residual.shape
        pad = triton.next_power_of_2(size)
        # 16 elements a thread: enough loads under way, and a reduction over few warps.
        num_warps = max(1, min(pad // 512, 16))
        add_norm_kernel[(num_tokens,)](
            residual, delta, weight, out, eps, SIZE=size, PAD=pad, num_warps=num_warps, **COMPILER_OPTIONS
        )

    def rotate(self, heads: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first `num_rotated` of heads [T, heads, D] in place, and return heads.

        Channel i is paired with i + D / 2; cos and sin are float32 [T, D / 2].
        """
        assert cos.dtype == sin.dtype == torch.float32
        num_tokens, num_heads, size = heads.shape
        half_pad = triton.next_power_of_2(size // 2)
        per_program = max(1, min(_ROTATE_TILE // half_pad, triton.next_power_of_2(num_rotated)))
        rotate_kernel[num_tokens, triton.cdiv(num_rotated, per_program)](
            heads,
            cos,
            sin,
            num_rotated,
            TOKEN=num_heads * size,
            HALF=size // 2,
            HALF_PAD=half_pad,
            HEADS=per_program,
            **COMPILER_OPTIONS,
        )
        return heads

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up for gate_up [T, 2 I], gate first; out [T, I]."""
        num_tokens, size = out.shape
        tile = min(_GATE_TILE, triton.next_power_of_2(size))
        silu_mul_kernel[num_tokens, triton.cdiv(size, tile)](gate_up, out, SIZE=size, TILE=tile, **COMPILER_OPTIONS)
