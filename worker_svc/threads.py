"""How threads compute on a CPU. Light: it must run before torch and its OpenMP runtime are loaded."""

import os


def prepare_environment(num_threads: int | None) -> None:
    """Set what OpenMP reads when it is loaded; what the user has set already stays.

    Threads sleep where they wait for each other. Spinning, the default, is up to a tenth faster on idle cores, but a
    thread that spins holds the very core that the thread it waits for may need: beside one other busy process a decode
    step of 8 rows on two cores took 219 ms spinning and 75 ms sleeping (49 and 56 ms alone).
    """
    count = num_threads or len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def set_num_threads(num_threads: int | None) -> None:
    """Have torch and the kernels use `num_threads` from the calling thread (OpenMP counts for each thread)."""
    import torch  # not before prepare_environment

    if num_threads is not None:
        torch.set_num_threads(num_threads)
