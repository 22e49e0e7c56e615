"""The worker's flags and variables."""

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from worker_svc.__main__ import main
from worker_svc.settings import WorkerSettings


def read(*arguments: str) -> WorkerSettings:
    return CliApp.run(WorkerSettings, cli_args=list(arguments))


def test_flags_and_variables_have_the_same_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BLOCK_SIZE", "32")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "5")
    settings = read("--max-num-seqs", "7", "--kv-cache-memory", "512MiB")
    assert (settings.block_size, settings.max_num_seqs, settings.kv_cache_memory) == (32, 7, 512 * 1024**2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: 2 GPUs a worker"),
        (["--block-size", "12"], "--block-size"),
        (["--kv-formats", "int8,int3"], "--kv-formats: int3 is none of all, native, int8"),
        (["--device", "gpu"], "--device: gpu is none of auto, cpu, cuda, auto:N and cuda:N"),
        (["--device", "cuda:x"], "--device: cuda:x is none of"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--log-level", "foo"], "--log-level: foo is none of debug, info, warning, error"),
        (["--no-such-flag"], "no-such-flag"),
        (["--host", "0.0.0.0"], "set a cluster token"),
    ],
)
def test_mistake_is_one_line_that_names_the_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_gpu_is_named_by_its_number(device: str) -> None:
    assert read("--device", device).device == device


def test_log_level_is_taken_in_capitals_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "DEBUG")
    assert read().log_level == "debug"


def test_settings_cannot_change() -> None:
    with pytest.raises(ValidationError):
        read().max_num_seqs = 3


def test_every_flag_is_described() -> None:
    assert all(field.description for field in WorkerSettings.model_fields.values())
