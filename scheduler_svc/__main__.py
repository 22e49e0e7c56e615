"""`python -m scheduler_svc`: the scheduler as a process."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from protos.channel import MissingTokenError
from protos.settings import SettingsMistakeError, read_settings
from protos.watched_files import FileMistakeError
from scheduler_svc.collector import collect_rarely
from scheduler_svc.registry import AllLanesFencedError
from scheduler_svc.server import CannotListenError, SchedulerServer
from scheduler_svc.settings import SchedulerSettings

logger = logging.getLogger("scheduler_svc")


def main(args: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. A second signal cuts the drain short."""
    try:
        settings = read_settings(SchedulerSettings, sys.argv[1:] if args is None else args)
        logging.basicConfig(
            stream=sys.stderr,
            level=settings.log_level.upper(),
            format="%(asctime)s %(levelname)s scheduler: %(message)s",
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings))
    except (SettingsMistakeError, MissingTokenError, FileMistakeError, CannotListenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


async def _serve(settings: SchedulerSettings) -> int:
    server = SchedulerServer(settings)
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    address = await server.start()
    collect_rarely()
    logger.info("ready on %s", address)
    failed = server.cell.failed
    try:
        await _until_any(failed, stop.wait())
        if stop.is_set():
            await _until_any(failed, server.drain(), hurry.wait())
    finally:
        await server.stop()
    if not failed.done():
        logger.info("stopped")
        return 0
    error = failed.result()
    logger.critical("cannot go on: %s", error, exc_info=None if isinstance(error, AllLanesFencedError) else error)
    return 1


async def _until_any(failed: asyncio.Future[BaseException], *coroutines: Coroutine[Any, Any, Any]) -> None:
    """Return when `failed` or any of the coroutines is done, and raise what that one raised; cancels the rest."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait((failed, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory where it is installed: a step costs the process about a tenth less then."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
