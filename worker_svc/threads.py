"""How threads compute on a CPU. Light: it must run before torch and its OpenMP runtime are loaded."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def prepare_environment(num_threads: int | None) -> None:
    """Set what OpenMP reads when it is loaded; what the user has set already stays.

    Threads sleep where they wait for each other. Spinning, the default, is up to a tenth faster on idle cores, but a
    thread that spins holds the very core that the thread it waits for may need: beside one other busy process a decode
    step of 8 rows on two cores took 219 ms spinning and 75 ms sleeping (49 and 56 ms alone).
    """
    count = num_threads or usable_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def set_num_threads(num_threads: int | None) -> None:
    """Have torch and the kernels use `num_threads` from the calling thread (OpenMP counts for each thread)."""
    import torch  # not before prepare_environment

    if num_threads is not None:
        torch.set_num_threads(num_threads)


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores that this process may use: of the machine, or whole ones of its container's share if less.

    With a thread more than the share has cores, every step would end with all threads waiting for the one that was
    stopped until the share's next period.
    """
    cores = len(os.sched_getaffinity(0))
    share = _cgroup_share(cgroup)
    return cores if share is None else max(1, min(cores, int(share)))


def _cgroup_share(cgroup: Path) -> float | None:
    """Return the cores' time that the container may take, in cores; None without a limit."""
    try:
        if (file := cgroup / "cpu.max").is_file():
            quota, period = file.read_text().split()
        else:
            folder = cgroup / "cpu"
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
