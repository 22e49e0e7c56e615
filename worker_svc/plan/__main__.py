"""`python -m worker_svc.plan`, which is `quire plan`: print what fits into a device's memory, and plot it.

Exit codes: 0; 1 when the model cannot be had or does not fit; 2 for a mistake in the flags. Each is one line on
standard error.
"""

import importlib.util
import signal
import sys
from collections.abc import Sequence

from protos.settings import SettingsMistakeError, read_settings
from worker_svc.errors import StartupError
from worker_svc.loader.errors import ModelError
from worker_svc.plan.memory import MemoryPlan, plan_memory
from worker_svc.plan.settings import PlanSettings
from worker_svc.plan.shape import read_shape
from worker_svc.plan.table import to_json, to_table

PLOT_PACKAGE = "matplotlib"


def main(arguments: Sequence[str]) -> int:
    """Plan; return the exit code."""
    try:
        settings = read_settings(PlanSettings, arguments)
    except SettingsMistakeError as error:
        _complain(f"{error} (quire plan --help shows every flag)")
        return 2
    if settings.plot is not None and importlib.util.find_spec(PLOT_PACKAGE) is None:
        _complain(f"--plot: {PLOT_PACKAGE} is not installed: run pip install matplotlib")
        return 1
    try:
        plan = plan_memory(settings, read_shape(settings, _print_line))
        _show(plan, settings)
    except (StartupError, ModelError, OSError) as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _show(plan: MemoryPlan, settings: PlanSettings) -> None:
    print(to_json(plan) if settings.output == "json" else to_table(plan))
    if settings.plot is not None:
        from worker_svc.plan.plot import draw_plan  # brings matplotlib, which a table does not need

        draw_plan(plan, settings.plot)


def _complain(line: str) -> None:
    _print_line(f"quire plan: {line}")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quire plan ... | head ends without a word
    sys.exit(main(sys.argv[1:]))
