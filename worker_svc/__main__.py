"""`python -m worker_svc`: read flags and QUIRE_* variables, load, serve.

Exit code 0 after SIGTERM or SIGINT; 1 with one line on standard error for what went wrong.
"""

import asyncio
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from protos.channel import MissingTokenError
from protos.credentials import Credentials
from protos.settings import SettingsMistakeError, read_settings
from protos.watched_files import FileMistakeError
from worker_svc.settings import WorkerSettings
from worker_svc.threads import prepare_environment, set_num_threads

logger = logging.getLogger("worker_svc")


def main(arguments: list[str]) -> int:
    """Run a worker; return the exit code."""
    try:
        settings = read_settings(WorkerSettings, arguments)
        credentials = Credentials.of_server(settings, settings.host)
    except (SettingsMistakeError, MissingTokenError, FileMistakeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # An orderly end would wait for the thread that loads the model, and nothing needs one before it is loaded: what an
    # import leaves behind, the next one removes.
    signal.signal(signal.SIGTERM, _exit_at_once)
    signal.signal(signal.SIGINT, _exit_at_once)
    prepare_environment(settings.num_threads)
    return _run(settings, credentials)


def _run(settings: WorkerSettings, credentials: Credentials) -> int:
    # These load torch, for which the environment had to be ready.
    from kernels.errors import KernelError
    from worker_svc.app import serve
    from worker_svc.assembly import load_worker
    from worker_svc.errors import DeviceHungError, WorkerError
    from worker_svc.loader.errors import ModelError

    # One thread computes whatever is computed, loading included. OpenMP gives every thread that does a team of its own,
    # and once there are more threads in teams than cores, they hardly spin any more (see worker_svc.threads).
    device = ThreadPoolExecutor(1, "device", set_num_threads, (settings.num_threads,))
    try:
        worker = device.submit(load_worker, settings).result()
        asyncio.run(serve(worker, device, settings, credentials))
    except (WorkerError, ModelError, KernelError) as error:
        logger.error("%s", " ".join(str(error).split()))
        logger.debug("how that came about", exc_info=True)
        if isinstance(error, DeviceHungError):
            logging.shutdown()
            os._exit(1)  # the interpreter's own end waits for every thread, and the device's is stuck
        return 1
    return 0


def _exit_at_once(_number: int, _frame: FrameType | None) -> None:
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
