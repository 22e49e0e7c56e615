"""The planner's flags: what goes together, and the one line that a mistake gets."""

import pytest

from tests.worker.plan.cases import GIB, make_settings
from worker_svc.plan.__main__ import main
from worker_svc.plan.settings import PlanSettings
from worker_svc.settings import WorkerSettings

SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-size", "128")


@pytest.mark.parametrize(
    ("text", "number"), [("6.74B", 6_740_000_000), ("135m", 135_000_000), ("7e9", 7 * 10**9), ("1000", 1000)]
)
def test_parameters_are_read_as_people_write_them(text: str, number: int) -> None:
    assert make_settings("--memory", "1GiB", "--parameters", text).parameters == number


def test_flags_of_serve_are_read_from_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_CACHE_MEMORY", "2GiB")
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "32")
    settings = make_settings()
    assert (settings.kv_cache_memory, settings.block_size) == (2 * GIB, 32)


def test_what_serve_has_too_has_its_default() -> None:
    for name in ("gpu_memory_utilization", "block_size", "dtype"):
        assert PlanSettings.model_fields[name].default == WorkerSettings.model_fields[name].default


def test_every_flag_is_described() -> None:
    assert all(field.description for field in PlanSettings.model_fields.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one of --memory, such as --memory 80GiB, and --kv-cache-memory"),
        (["--memory", "8GiB", "--kv-cache-memory", "1GiB"], "give one of --memory"),
        (["--memory", "much"], "--memory: "),
        (["--memory", "0"], "--memory: not more than 0 bytes"),
        (["--memory", "8GiB", "--weights-memory", "0"], "--weights-memory: not more than 0 bytes"),
        (["--memory", "8GiB", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--memory", "8GiB", "--mean-length", "0"], "--mean-length"),
        (["--memory", "8GiB", "--dtype", "int8"], "--dtype"),
        (["--memory", "8GiB", "--block-size", "5"], "--block-size: 5 is none of 8, 16, 32"),
        (["--memory", "8GiB", "--output", "yaml"], "--output"),
        (["--memory", "8GiB", "--parameters", "many"], "--parameters: many is not a number such as 6.74B"),
        (["--memory", "8GiB", "--parameters", "nan"], "--parameters: nan is not a number"),
        (["--memory", "8GiB", "--parameters", ""], "--parameters:  is not a number"),
        (["--memory", "8GiB", "--parameters", "7B", "--weights-memory", "1GiB"], "--parameters or --weights-memory"),
        (["--memory", "8GiB", "--layers", "32", "--head-size", "64"], "--kv-heads is missing"),
        (["--memory", "8GiB", "--layers", "0"], "--layers"),
        (["--memory", "8GiB", *SHAPE], "give --parameters or --weights-memory"),
        (["--memory", "8GiB", *SHAPE, "--model", "bundled"], "give --model or a shape"),
        (["--memory", "8GiB", "--no-such-flag"], "no-such-flag"),
    ],
)
def test_mistake_is_one_line_that_names_the_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("quire plan: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
