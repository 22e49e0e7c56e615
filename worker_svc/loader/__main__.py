"""`python -m worker_svc.loader MODEL`: print the model's folder on stdout; progress goes to stderr."""

import sys

from worker_svc.loader.errors import ModelError
from worker_svc.loader.resolve import resolve_model

USAGE = "usage: python -m worker_svc.loader MODEL   (a model folder, a GGUF file, a Hub id, or bundled)"


def main(arguments: list[str]) -> int:
    """Return the exit code: 0, 1 for a model that cannot be had (one line on stderr says why), 2 for wrong usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        folder = resolve_model(arguments[0], _print_progress)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(folder)
    return 0


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
