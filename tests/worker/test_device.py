"""Which device and dtype a worker computes with."""

import pytest
import torch

from kernels.errors import UnsupportedDeviceError
from worker_svc import assembly
from worker_svc.device import CPU, Gpu, choose_device, choose_dtype, use_device
from worker_svc.errors import StartupError

HOPPER = Gpu("NVIDIA H200", (9, 0))
AMPERE = Gpu("NVIDIA A100", (8, 0))
TURING = Gpu("Tesla T4", (7, 5))
AMD = Gpu("AMD Instinct MI300X", (9, 4), is_amd=True)


@pytest.mark.parametrize(
    ("wish", "num_gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("auto:1", 0, "cpu"),
        ("auto:1", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:11", 12, "cuda:11"),
    ],
)
def test_device_is_the_one_asked_for(wish: str, num_gpus: int, device: str) -> None:
    assert choose_device(wish, [HOPPER] * num_gpus) == torch.device(device)


def test_gpu_too_old_for_the_kernels_is_refused_or_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_device("cuda:1", [TURING, AMPERE]) == torch.device("cuda:1")
    assert choose_device("auto", [AMD]) == torch.device("cuda:0")
    with pytest.raises(StartupError, match=r"--device cuda: Tesla T4 \(sm_75\) is too old.* 8\.0"):
        choose_device("cuda", [TURING])
    assert choose_device("auto", [TURING]) == CPU
    assert choose_device("auto:1", [AMPERE, TURING]) == CPU
    assert "computing on the CPU, though there is a GPU: Tesla T4 (sm_75) is too old" in caplog.text


def test_gpu_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(StartupError, match="--device cuda: this machine has no GPU that torch can use") as caught:
        choose_device("cuda", [])
    assert "\n" not in str(caught.value)
    with pytest.raises(StartupError, match="--device cuda:2: torch sees 2 GPUs here, the last is cuda:1"):
        choose_device("cuda:2", [HOPPER, HOPPER])


@pytest.mark.parametrize(
    ("wish", "dtype"), [("auto", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)]
)
def test_dtype_is_the_one_asked_for(wish: str, dtype: torch.dtype) -> None:
    assert choose_dtype(wish) is dtype


def test_using_the_cpu_needs_nothing() -> None:
    use_device(CPU)


@pytest.mark.parametrize("wish", ["auto", "auto:0"])
def test_gpu_without_kernels_is_passed_by_where_the_choice_is_ours(
    wish: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu_backend = object()

    def backend_for(device: torch.device) -> object:
        if device.type == "cuda":
            raise UnsupportedDeviceError("the kernels for GPUs need the package 'triton'")
        return cpu_backend

    monkeypatch.setattr(assembly, "backend_for", backend_for)
    assert assembly._device_and_backend(wish, [HOPPER]) == (CPU, cpu_backend)
    assert "computing on the CPU, though there is a GPU: the kernels for GPUs need" in caplog.text
    with pytest.raises(UnsupportedDeviceError):
        assembly._device_and_backend("cuda", [HOPPER])
