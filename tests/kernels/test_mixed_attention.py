"""Attention over tables in which blocks of one row have different formats."""

import pytest
import torch

from kernels.dispatch import AttentionParams, Backend
from kernels.formats import Format, KVLayout
from kernels.reference import attend
from tests.kernels.cases import attention, demoted, filled_arena, in_disorder, make_case, plain_params
from tests.kernels.formula import Array, dequantized, quantized


def kept(x: torch.Tensor, layout: KVLayout, side: str) -> torch.Tensor:
    """Return what a row's blocks keep of float32 [tokens, num_kv_heads, head_size], heads first."""
    x = x.to(getattr(torch, layout.native_dtype)).float().transpose(0, 1).contiguous()
    for b in range(x.shape[1] // layout.block_size):
        fmt, tokens = in_disorder(0, b), slice(b * layout.block_size, (b + 1) * layout.block_size)
        if fmt is not Format.NATIVE:
            block: Array = x[:, tokens].contiguous().numpy()
            x[:, tokens] = torch.from_numpy(dequantized(quantized(block, side, fmt), side, fmt))
    return x


@pytest.mark.parametrize("native_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_reference_reads_what_the_formula_wrote(reference: Backend, block_size: int, native_dtype: str) -> None:
    case = make_case([(201, 30)], block_size=block_size, native_dtype=native_dtype)
    mixed, arena = demoted(reference, case, in_disorder)
    params = AttentionParams(0.125, sliding_window=150)
    wanted = attend(case.queries(), kept(case.key, case.layout, "key"), kept(case.value, case.layout, "value"), params)
    torch.testing.assert_close(attention(reference, mixed, params, arena=arena), wanted, rtol=0, atol=1e-6)


def test_int8_comes_close_to_native(reference: Backend) -> None:
    case = make_case([(300, 1)])
    mixed, arena = demoted(reference, case, lambda _row, _block: Format.INT8)
    native = attention(reference, case, plain_params(case), arena=filled_arena(reference, case))
    torch.testing.assert_close(attention(reference, mixed, arena=arena), native, rtol=0, atol=0.01)
