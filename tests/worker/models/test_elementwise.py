"""The compiled elementwise operations against torch's, for few rows (one thread) and many (all threads)."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.elementwise import CpuElementwise, _begin
from worker_svc.models.elementwise import TorchElementwise

# Rows on both sides of where work is shared out among threads, and no multiple of what a thread takes.
ROWS = [1, 8, 9, 517]
SIZES = [2, 48, 576]
DTYPES = [torch.float32, torch.bfloat16]  # of what goes into products and comes out of them


@pytest.fixture(scope="module")
def compiled() -> CpuElementwise:
    return CpuElementwise(torch.bfloat16)


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_rounded_from(result: Tensor, exact: Tensor) -> None:
    """Assert that a result is the exact float32 one, to float32's own noise and one rounding to the result's dtype."""
    half_a_step = torch.finfo(result.dtype).eps / 2 if result.dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(result.float(), exact, rtol=1e-5 + half_a_step, atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(compiled: CpuElementwise, dtype: torch.dtype, num_rows: int, size: int) -> None:
    weight, delta = make(size), (make(num_rows, size) * 3).to(dtype)
    residual, expected_residual = make(num_rows, size) + 1, make(num_rows, size) + 1
    out, expected = torch.empty(num_rows, size, dtype=dtype), torch.empty(num_rows, size)
    compiled.add_rms_norm(residual, delta, weight, 1e-5, out)
    TorchElementwise().add_rms_norm(expected_residual, delta.float(), weight, 1e-5, expected)
    torch.testing.assert_close(residual, expected_residual, rtol=1e-5, atol=1e-6)
    assert_rounded_from(out, expected)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_leaves_the_heads_behind_alone(
    compiled: CpuElementwise, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    angles = make(num_rows, size // 2) * 50
    heads = make(num_rows, 5, size).to(dtype)
    rotated = compiled.rotate(heads, 4, angles.cos(), angles.sin())
    assert torch.equal(heads, make(num_rows, 5, size).to(dtype))
    expected = TorchElementwise().rotate(heads.float(), 4, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(rotated[:, 4:], heads[:, 4:].float())
    assert not torch.equal(rotated[:, 3], heads[:, 3].float())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(compiled: CpuElementwise, dtype: torch.dtype, num_rows: int, size: int) -> None:
    gate_up = (make(num_rows, 2 * size) * 6).to(dtype)
    out, expected = torch.empty(num_rows, size, dtype=dtype), torch.empty(num_rows, size)
    compiled.silu_mul(gate_up, out)
    TorchElementwise().silu_mul(gate_up.float(), expected)
    assert_rounded_from(out, expected)


def test_silu_of_extreme_gates(compiled: CpuElementwise) -> None:
    gates = torch.tensor([[-1e4, -100.0, -87.0, -0.0, 1e-8, 87.0, 100.0, 1e4, float("inf")]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    out = torch.empty_like(gates)
    compiled.silu_mul(gate_up, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(gates), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_lost(compiled: CpuElementwise, dtype: torch.dtype) -> None:
    out = torch.zeros(1, 1, dtype=dtype)
    compiled.silu_mul(torch.tensor([[float("nan"), 1.0]], dtype=dtype), out)
    assert out.isnan().all()
    out = torch.zeros(1, 2, dtype=dtype)
    delta = torch.zeros(1, 2, dtype=dtype)
    compiled.add_rms_norm(torch.tensor([[float("nan"), 1.0]]), delta, torch.ones(2), 1e-5, out)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_does_not_depend_on_the_batch(compiled: CpuElementwise, dtype: torch.dtype) -> None:
    """Bit for bit: a chunk's rows on many threads, and each of them alone."""
    residual, delta, weight = make(517, 576), make(517, 576).to(dtype), make(576)
    gate_up, heads, angles = make(517, 1152).to(dtype), make(517, 9, 64).to(dtype), make(517, 32) * 50

    def results(rows: slice) -> list[Tensor]:
        normed, gated = torch.empty_like(delta[rows]), torch.empty_like(delta[rows])
        compiled.add_rms_norm(residual[rows].clone(), delta[rows], weight, 1e-5, normed)
        compiled.silu_mul(gate_up[rows], gated)
        return [normed, gated, compiled.rotate(heads[rows], 7, angles[rows].cos(), angles[rows].sin())]

    together = results(slice(None))
    for row in (0, 100, 516):
        for alone, all_rows in zip(results(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], all_rows[row])


def test_nothing_is_left_to_compile_once_it_is_made() -> None:
    compiled = CpuElementwise(torch.bfloat16)
    num_variants = len(_begin.signatures)  # type: ignore[attr-defined]  # Numba's
    for dtype in DTYPES:
        delta = make(3, 8).to(dtype)
        compiled.add_rms_norm(make(3, 8), delta, make(8), 1, delta)
        compiled.rotate(make(3, 2, 4).to(dtype), 1, make(3, 2), make(3, 2))
        compiled.silu_mul(delta, make(3, 4).to(dtype))
    assert len(_begin.signatures) == num_variants == len(DTYPES)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_rows", [1, 517])
def test_what_addresses_do_not_tell_is_refused(num_rows: int) -> None:
    """Tensors pass as addresses: a wrong dtype, size or stride must not come that far."""
    compiled = CpuElementwise()
    gate_up, out = make(num_rows, 1152), make(num_rows, 576)
    with pytest.raises(AssertionError, match="nothing is compiled for"):
        compiled.silu_mul(gate_up.bfloat16(), out.bfloat16())
    with pytest.raises(AssertionError):
        compiled.silu_mul(gate_up, out.bfloat16())
    with pytest.raises(AssertionError, match="by their number"):
        compiled.silu_mul(make(1152, num_rows + 1)[:, 1:].T, out)
    with pytest.raises(AssertionError):
        compiled.silu_mul(gate_up[:, :576].contiguous(), out)
    with pytest.raises(AssertionError):
        compiled.add_rms_norm(out, out[:0], make(576), 1e-5, out)
    with pytest.raises(AssertionError):
        compiled.rotate(make(num_rows, 9, 64), 7, make(num_rows, 16), make(num_rows, 16))
