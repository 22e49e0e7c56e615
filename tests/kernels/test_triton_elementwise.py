"""Triton's elementwise operations in the interpreter, against torch's."""

import pytest
import torch
from torch import Tensor

from tests.interpreted import import_interpreted
from worker_svc.models.elementwise import Elementwise, TorchElementwise

pytest.importorskip("triton", reason="Triton is for Linux")
elementwise = import_interpreted("kernels.triton.elementwise")
pytestmark = pytest.mark.usefixtures("interpreting")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A unit in the last place, where the order of a sum decides how a result is rounded; in bfloat16, which the interpreter
# cuts rather than rounds, one for each time that a value is written.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-10}


def operations() -> list[Elementwise]:
    return [elementwise.TritonElementwise(), TorchElementwise()]


def make(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 48, 576])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    results = []
    for one in operations():
        residual, out = make(dtype, 5, size) + 1, torch.empty(5, size, dtype=dtype)
        one.add_rms_norm(residual, make(dtype, 5, size) * 3, make(dtype, size), 1e-5, out)
        results.append((residual, out))
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_heads", "num_rotated"), [(2, 3, 2), (48, 5, 4), (64, 12, 12), (16, 300, 299)])
def test_rotate_leaves_the_heads_behind_alone(size: int, num_heads: int, num_rotated: int, dtype: torch.dtype) -> None:
    angles = make(torch.float32, 3, size // 2) * 50
    original = make(dtype, 3, num_heads, size)
    results = [one.rotate(original.clone(), num_rotated, angles.cos(), angles.sin()) for one in operations()]
    assert_close(results[0], results[1])
    assert torch.equal(results[0][:, num_rotated:], original[:, num_rotated:])
    assert not torch.equal(results[0][:, num_rotated - 1], original[:, num_rotated - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 48, 1500])
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = make(dtype, 3, 2 * size) * 4
    results = []
    for one in operations():
        out = torch.empty(3, size, dtype=dtype)
        one.silu_mul(gate_up, out)
        results.append(out)
    # torch rounds silu(gate) before it multiplies.
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of numpy, in the place of the GPU
def test_extreme_gates_and_nan() -> None:
    gates = torch.tensor([[-1e4, -100.0, -87.0, -0.0, 1e-8, 87.0, 1e4, float("inf"), float("nan")]])
    out = torch.empty_like(gates)
    elementwise.TritonElementwise().silu_mul(torch.cat((gates, torch.ones_like(gates)), dim=1), out)
    torch.testing.assert_close(out, torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30, equal_nan=True)
