"""How many threads compute on a CPU. Light: it must run before torch and its OpenMP runtime are loaded."""

import os


def prepare_environment(num_threads: int | None) -> None:
    """Set what OpenMP reads when it is loaded; what the user has set already stays."""
    count = num_threads or len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(count))


def set_num_threads(num_threads: int | None) -> None:
    """Have torch and the kernels use `num_threads` from the calling thread (OpenMP counts for each thread)."""
    import torch  # not before prepare_environment

    if num_threads is not None:
        torch.set_num_threads(num_threads)
