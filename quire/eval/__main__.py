"""`python -m quire.eval`, which is `quire eval`: measure policies, print a table, write JSON and a plot.

Exit codes: 0; 1 when the model cannot be had or computed, or a file cannot be written; 2 for a mistake in the flags or
in a file that they name. Each is one line on standard error.
"""

import importlib.util
import signal
import sys
from collections.abc import Sequence

from protos.settings import SettingsMistakeError, read_settings
from quire.eval.errors import EvalMistakeError
from quire.eval.policies import NamedPolicy, read_policies
from quire.eval.settings import EvalSettings
from worker_svc.threads import prepare_environment

PLOT_PACKAGE = "matplotlib"


def main(arguments: Sequence[str]) -> int:
    """Evaluate; return the exit code."""
    try:
        settings = read_settings(EvalSettings, arguments)
        policies = read_policies(settings.policies)
        if settings.plot is not None:
            _check_plot(settings)
        prepare_environment(settings.num_threads)
        return _run(settings, policies)
    except SettingsMistakeError as error:
        _complain(f"{error} (quire eval --help shows every flag)")
        return 2
    except EvalMistakeError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _run(settings: EvalSettings, policies: list[NamedPolicy]) -> int:
    # These load torch, for which the environment had to be ready.
    from kernels.errors import KernelError
    from quire.eval.generation import missing_overlap_packages
    from quire.eval.run import evaluate
    from quire.eval.table import to_table
    from worker_svc.errors import StartupError
    from worker_svc.loader.errors import ModelError

    try:
        summaries = evaluate(settings, policies, _print_line)
        print(to_table(summaries))
        if "generation" in settings.task_names and (missing := missing_overlap_packages()):
            _print_line(f"no BLEU or ROUGE-L: {', '.join(missing)} not installed: run pip install 'quire[eval]'")
        if settings.plot is not None:
            from quire.eval.plot import draw_curve  # brings matplotlib, which a table does not need

            title = f"{settings.model}: KL in windows of {settings.window_tokens:,} tokens, over bytes of KV"
            draw_curve(summaries, title, settings.plot)
    except (StartupError, ModelError, KernelError, OSError) as error:
        _complain(" ".join(str(error).split()))
        return 1
    return 0


def _check_plot(settings: EvalSettings) -> None:
    """Find out before hours of measuring, not after. Raises EvalMistakeError."""
    if importlib.util.find_spec(PLOT_PACKAGE) is None:
        raise EvalMistakeError(f"--plot: {PLOT_PACKAGE} is not installed: run pip install 'quire[eval]'")
    if "text" not in settings.task_names:
        raise EvalMistakeError("--plot shows KL, which the task text measures")
    if settings.plot is not None and not settings.plot.absolute().parent.is_dir():
        raise EvalMistakeError(f"--plot: cannot write {settings.plot}: no such folder")


def _complain(line: str) -> None:
    _print_line(f"quire eval: {line}")


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quire eval ... | head ends without a word
    sys.exit(main(sys.argv[1:]))
