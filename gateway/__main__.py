"""`python -m gateway`: read settings and the model's folder, then serve until SIGTERM or SIGINT."""

import asyncio
import logging
import sys

import uvloop

from gateway.answering import Gateway
from gateway.errors import StartupError
from gateway.server import listen, serve
from gateway.settings import GatewaySettings
from protos.settings import SettingsMistakeError, read_settings
from protos.watched_files import FileMistakeError


def start_logging(level: str) -> None:
    """Send log lines to standard error."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # What uvicorn tells of its start and end, the gateway says in its own words.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def main() -> int:
    """Run the gateway; return the exit code."""
    try:
        settings = read_settings(GatewaySettings, sys.argv[1:])
        start_logging(settings.log_level)
        gateway = Gateway.load(settings)
        listener = listen(settings.host, settings.port)
    except (SettingsMistakeError, FileMistakeError, StartupError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(gateway, listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
