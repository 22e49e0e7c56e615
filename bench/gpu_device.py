"""Where `bench.gpu` measures: a GPU, or the CPU with Triton's interpreter to try the script itself at tiny sizes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kernels.dispatch import Backend, backend_for
from kernels.formats import Format
from worker_svc.engine import GpuParts, StepLimits
from worker_svc.gpu_memory import MemoryReading
from worker_svc.graphs import CudaGraphRecorder, Recorder, RerunRecorder
from worker_svc.models.elementwise import Elementwise, elementwise_for
from worker_svc.staging import PinnedInputs

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do at best, measured here."""

    bytes_per_s: float  # read and written
    flops_per_s: float  # of a matrix product in bfloat16


class Bench:
    """A device with clocks; this one is a GPU."""

    device = torch.device("cuda", 0)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)

    def backend(self) -> Backend:
        """Return the kernels."""
        return backend_for(self.device)

    def backend_of(self, formats: Sequence[Format]) -> Backend:
        """Return other kernels of the same kind, which serve blocks of the formats besides native ones."""
        from kernels.triton.backend import TritonBackend

        return TritonBackend(self.device, formats=formats)

    def elementwise(self) -> Elementwise:
        """Return the operations between matrix products."""
        return elementwise_for(self.device, torch.bfloat16)

    def describe(self) -> str:
        """Return one line about device and libraries."""
        properties = torch.cuda.get_device_properties(self.device)
        memory_gib = properties.total_memory / _GIB
        return f"{properties.name}, {memory_gib:.0f} GiB, torch {torch.__version__}, CUDA {torch.version.cuda}"

    def parts(self, limits: StepLimits) -> GpuParts:
        """Return what an engine is built with."""
        return GpuParts.of(self.device, limits)

    def recorder(self) -> Recorder:
        """Return what records launches, so that the host's own time does not count."""
        return CudaGraphRecorder(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def milliseconds(self, action: Callable[[], object], repeats: int) -> float:
        """Return the median of the device's time for an action, after two that do not count."""
        times = []
        for repeat in range(repeats + 2):
            begin, end = _timing_event(), _timing_event()
            begin.record()
            action()
            end.record()
            self.wait()
            if repeat >= 2:
                times.append(float(begin.elapsed_time(end)))
        return median(times)

    def recorded_milliseconds(self, action: Callable[[], Tensor], repeats: int) -> float:
        """Return the same for a recording of the action: launched as one, as the engine's decode steps are."""
        return self.milliseconds(self.recorder().record(action).replay, repeats)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DryBench(Bench):
    """The CPU in the place of a GPU: all that the script does, nothing of what it measures.

    Triton must be imported with TRITON_INTERPRET=1 in the environment.
    """

    device = torch.device("cpu")

    def backend(self) -> Backend:
        """Return the same kernels, interpreted; products are in float32, for the interpreter's bfloat16 is wrong."""
        return self.backend_of(())

    def backend_of(self, formats: Sequence[Format]) -> Backend:
        """As `backend`."""
        from kernels.triton.backend import TRITON_DTYPES, TritonBackend
        from kernels.triton.tuning import Chip

        dtypes = dict.fromkeys(TRITON_DTYPES, TRITON_DTYPES["float32"])
        return TritonBackend("cpu", Chip("cuda", 90), dtypes, formats)

    def elementwise(self) -> Elementwise:
        """Return the GPU's, interpreted."""
        from kernels.triton.elementwise import TritonElementwise

        return TritonElementwise()

    def describe(self) -> str:
        """Return one line that says what this is not."""
        return f"a dry run on the CPU, torch {torch.__version__}: the figures mean nothing"

    def parts(self, limits: StepLimits) -> GpuParts:
        """Return stand-ins."""

        def allocate_host(num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8)

        inputs = PinnedInputs(limits.input_bytes, self.device, allocate_host, _NoEvent)
        return GpuParts(inputs, _NoProbe(), RerunRecorder)

    def recorder(self) -> Recorder:
        """Return one that runs again."""
        return RerunRecorder()

    def wait(self) -> None:
        """Return at once."""

    def milliseconds(self, action: Callable[[], object], repeats: int) -> float:
        """Return the time of one run."""
        begin_s = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - begin_s)


class _NoEvent:
    """A copy in main memory is done when it returns."""

    def record(self) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


class _NoProbe:
    """A small GPU on which nothing ever takes memory."""

    def read(self) -> MemoryReading:
        """Return it."""
        return MemoryReading(total_bytes=1 << 26, free_bytes=1 << 26, reserved_bytes=0, peak_bytes=1 << 25)

    def reset_peak(self) -> None:
        """Do nothing."""

    def release_cached(self) -> None:
        """Do nothing."""


def measure_ceilings(bench: Bench, copy_bytes: int, product_size: int) -> Ceilings:
    """Return the rates of a copy inside the device's memory and of a square product of random bfloat16 matrices."""
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_ms = bench.milliseconds(lambda: target.copy_(source), 10)
    left, right = (torch.randn(product_size, product_size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    product_ms = bench.milliseconds(lambda: left @ right, 10)
    return Ceilings(2e3 * copy_bytes / copy_ms, 2e3 * product_size**3 / product_ms)
