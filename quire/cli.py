"""The entry point of the `quire` command: it names a subcommand and hands it the rest of the line."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

USAGE = """\
usage: quire COMMAND [flags]

  serve      serve a model: gateway, scheduler and worker on this machine
  chat       talk to a served model in the terminal
  key        make an API key for a tenant
  plan       how many sequences fit into a device's memory, in every KV format
  eval       what KV precision policies cost in quality: perplexity, KL, accuracy, generated text

quire COMMAND --help shows a command's flags; quire --version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` (default: the process's own arguments) names; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case ["serve", *rest]:
            from quire.serve import main as serve

            return serve(rest)
        case ["chat", *rest]:
            from quire.chat import main as chat

            return chat(rest)
        case ["key", *rest]:
            become("gateway.key", rest)
        case ["plan", *rest]:
            become("worker_svc.plan", rest)
        case ["eval", *rest]:
            become("quire.eval", rest)
        case ["--version"]:
            print(f"quire {version('quire')}")
            return 0
        case ["--help" | "-h" | "help"]:
            print(USAGE, end="")
            return 0
    print(USAGE, end="", file=sys.stderr)
    if arguments:
        print(f"quire: no such command: {arguments[0]}", file=sys.stderr)
    return 2


def become(module: str, arguments: Sequence[str]) -> NoReturn:
    """Go on as `python -m module`, in this process's place: what only one service may import is its own to run."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    sys.exit(main())
