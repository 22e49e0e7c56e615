"""What goes wrong on a GPU while a worker starts, told in one line to the person who starts it.

What torch and Triton raise there is seldom a mistake in this code: no memory, a driver that fails, no C compiler. A
worker that serves already is told otherwise (`step.py`): its process ends, and the scheduler sees it.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker_svc.errors import StartupError


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Raise StartupError for what a GPU, its driver or Triton's compiler refuses in the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(
            "the GPU's memory does not suffice: take a smaller model, lower --max-num-batched-tokens or "
            f"--max-num-seqs, or end what else runs there ({first_line(error)})"
        ) from error
    except Exception as error:
        if _is_of_driver(error):
            raise StartupError(f"the GPU failed: {first_line(error)}") from error
        if _is_of_triton(error):
            raise StartupError(
                f"the GPU's kernels cannot be compiled (Triton needs a C compiler and Python's headers): {error}"
            ) from error
        raise


def first_line(error: Exception) -> str:
    """Return the first line of an error's message: those of GPUs go on with advice for programmers."""
    return str(error).strip().partition("\n")[0]


def _is_of_driver(error: Exception) -> bool:
    """Return whether the driver, or a library for matrix products, refused something."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and str(error).startswith("CUDA error")
    )


def _is_of_triton(error: Exception) -> bool:
    """Return whether Triton's code was running: a missing compiler is but a RuntimeError, a failing one is its own."""
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.partition(".")[0] == "triton" for name in modules)
