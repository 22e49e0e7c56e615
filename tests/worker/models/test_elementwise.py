"""The compiled elementwise operations against torch's, for few rows (one thread) and many (all threads)."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.elementwise import CpuElementwise
from worker_svc.models.elementwise import TorchElementwise

# Rows on both sides of where work is shared out among threads, and no multiple of what a thread takes.
ROWS = [1, 8, 9, 517]
SIZES = [2, 48, 576]


@pytest.fixture(scope="module")
def compiled() -> CpuElementwise:
    return CpuElementwise()


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(compiled: CpuElementwise, num_rows: int, size: int) -> None:
    weight, delta = make(size), make(num_rows, size) * 3
    results = []
    for operations in (compiled, TorchElementwise()):
        residual, out = make(num_rows, size) + 1, torch.empty(num_rows, size)
        operations.add_rms_norm(residual, delta, weight, 1e-5, out)
        results.append((residual, out))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_rotate_leaves_the_heads_behind_alone(compiled: CpuElementwise, num_rows: int, size: int) -> None:
    angles = make(num_rows, size // 2) * 50
    original = make(num_rows, 5, size)
    results = []
    for operations in (compiled, TorchElementwise()):
        heads = original.clone()
        operations.rotate(heads, 4, angles.cos(), angles.sin())
        results.append(heads)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][:, 4:], original[:, 4:])
    assert not torch.equal(results[0][:, 3], original[:, 3])


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(compiled: CpuElementwise, num_rows: int, size: int) -> None:
    gate_up = make(num_rows, 2 * size) * 6
    results = []
    for operations in (compiled, TorchElementwise()):
        out = torch.empty(num_rows, size)
        operations.silu_mul(gate_up, out)
        results.append(out)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_silu_of_extreme_gates(compiled: CpuElementwise) -> None:
    gates = torch.tensor([[-1e4, -100.0, -87.0, -0.0, 1e-8, 87.0, 100.0, 1e4, float("inf")]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    out = torch.empty_like(gates)
    compiled.silu_mul(gate_up, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30)


def test_nan_is_not_lost(compiled: CpuElementwise) -> None:
    out = torch.zeros(1, 1)
    compiled.silu_mul(torch.tensor([[float("nan"), 1.0]]), out)
    assert out.isnan().all()
    out = torch.zeros(1, 2)
    compiled.add_rms_norm(torch.tensor([[float("nan"), 1.0]]), torch.zeros(1, 2), torch.ones(2), 1e-5, out)
    assert out.isnan().all()


def test_a_rows_result_does_not_depend_on_the_batch(compiled: CpuElementwise) -> None:
    """Bit for bit: a chunk's rows on many threads, and each of them alone."""
    residual, delta, weight = make(517, 576), make(517, 576), make(576)
    together = torch.empty(517, 576)
    compiled.add_rms_norm(residual.clone(), delta, weight, 1e-5, together)
    gate_up = make(517, 1152)
    gated = torch.empty(517, 576)
    compiled.silu_mul(gate_up, gated)
    for row in (0, 100, 516):
        alone = torch.empty(1, 576)
        compiled.add_rms_norm(residual[row : row + 1].clone(), delta[row : row + 1], weight, 1e-5, alone)
        assert torch.equal(alone[0], together[row])
        compiled.silu_mul(gate_up[row : row + 1], alone)
        assert torch.equal(alone[0], gated[row])
