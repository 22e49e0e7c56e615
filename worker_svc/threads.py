"""How threads compute on a CPU. Light: it must run before torch and its OpenMP runtime are loaded."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_SPINS = "1000"  # pause instructions, of 20 to 45 nanoseconds


def prepare_environment(num_threads: int | None) -> None:
    """Set what OpenMP reads when it is loaded; what the user has set already stays.

    Threads that wait for each other spin for 20 to 45 microseconds, which covers most of what lies between two matrix
    products, and then sleep. A decode step of 8 rows on two Zen 5 cores, in ms, by how often they look before they
    sleep (GOMP_SPINCOUNT):

    | | 0 | 600 | 1,000 | 3,000 |
    | --- | --- | --- | --- | --- |
    | in a cell that streams | 22.3 | 19.3 | 17.7 | 17.4 |
    | alone | 20.0 | 15.7 | 14.2 | 13.4 |
    | beside a busy process | 23.0 | 27.0 | 29.4 | 41.0 |
    | beside another worker on the same cores | 23.5 | 27.5 | 29.7 | 44.6 |

    So workers that share cores do better with `OMP_WAIT_POLICY=passive` (0 here), and best with as many threads each
    (`--num-threads`) as cores are its own: so `quire serve --workers` shares out those of the machine.
    """
    count = num_threads or usable_cores()
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


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
