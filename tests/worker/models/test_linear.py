"""Every way to multiply gives the product, and the choice between them is the promised one."""

import pytest
import torch
from torch.nn import functional as F

from worker_svc.models import linear
from worker_svc.models.linear import (
    PackedBFloat16Linear,
    PackedFloat32Linear,
    PackedHalfLinear,
    PlainHead,
    PlainLinear,
    make_head,
    make_linear,
)

CPU = torch.device("cpu")


def make_weight(dtype: torch.dtype, num_outputs: int = 70, num_inputs: int = 600) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_outputs)
    return torch.randn(num_outputs, num_inputs, generator=generator).mul(0.1).to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 8, 33])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_product_of_float32_activations(dtype: torch.dtype, with_bias: bool, num_tokens: int) -> None:
    weight = make_weight(dtype)
    bias = weight[:, 0].clone() if with_bias else None
    x = make_weight(torch.float32, num_tokens)
    expected = F.linear(x, weight.float(), None if bias is None else bias.float())
    product = make_linear(weight, bias, CPU)
    y = product(x.to(product.dtype))
    assert y.dtype is product.dtype
    tolerance = 0.02 if isinstance(product, PackedBFloat16Linear) else 1e-4
    torch.testing.assert_close(y.float(), expected, rtol=0.0, atol=tolerance)
    if bias is None:
        logits = make_head(weight, CPU)(x)
        assert logits.dtype is torch.float32
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=1e-4)


def test_float32_weights_are_packed_as_they_are() -> None:
    chosen = make_linear(make_weight(torch.float32), None, CPU)
    assert isinstance(chosen, PackedFloat32Linear)
    assert chosen.weight_bytes == 4 * 70 * 600


def test_half_weights_count_the_padding_of_whole_blocks() -> None:
    assert PackedHalfLinear(make_weight(torch.float16), None).weight_bytes == 2 * 80 * 1024


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_are_packed_in_two_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_works", lambda strategy: strategy is not PackedBFloat16Linear)
    assert isinstance(make_linear(make_weight(dtype), None, CPU), PackedHalfLinear)
    assert isinstance(make_head(make_weight(dtype), CPU), PackedHalfLinear)


def test_bfloat16_hardware_is_used_for_all_but_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chosen:
        weight_bytes = 0
        dtype = torch.bfloat16

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None: ...

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    monkeypatch.setattr(linear, "PackedBFloat16Linear", Chosen)
    monkeypatch.setattr(linear, "_works", lambda _strategy: True)
    assert isinstance(make_linear(make_weight(torch.bfloat16), None, CPU), Chosen)
    assert isinstance(make_head(make_weight(torch.bfloat16), CPU), PackedHalfLinear)


def test_weights_beyond_half_precision_stay_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_works", lambda strategy: strategy is not PackedBFloat16Linear)
    weight = make_weight(torch.bfloat16)
    weight[3, 5] = 1e6
    chosen = make_linear(weight, None, CPU)
    assert isinstance(chosen, PackedFloat32Linear)
    x = make_weight(torch.float32, 2)
    torch.testing.assert_close(chosen(x), F.linear(x, weight.float()), rtol=1e-5, atol=1e-4)


def test_without_packing_the_product_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_works", lambda _strategy: False)
    weight, x = make_weight(torch.bfloat16), make_weight(torch.float32, 3)
    chosen = make_linear(weight, weight[:, 0], CPU)
    assert isinstance(chosen, PlainLinear)
    torch.testing.assert_close(chosen(x), F.linear(x, weight.float(), weight[:, 0].float()), rtol=0.0, atol=1e-4)


def test_gpu_head_returns_float32_and_shares_its_weight() -> None:
    weight = make_weight(torch.bfloat16)
    head = PlainHead(weight)
    assert head.weight is weight
    assert head(make_weight(torch.bfloat16, 2)).dtype is torch.float32


@pytest.mark.parametrize("num_inputs", [576, 1536])
def test_single_float32_row_is_summed_as_several_are(num_inputs: int) -> None:
    product = PackedFloat32Linear(make_weight(torch.float32, 576, num_inputs), None)
    x = torch.randn(3, num_inputs, generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(x[:1]), product(x[:2])[:1])
