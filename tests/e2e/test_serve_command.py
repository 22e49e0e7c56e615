"""`quire serve` from the outside: mistakes are one clear line and leave nothing running."""

import asyncio
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from openai import AuthenticationError, OpenAI
from pydantic_settings import CLI_SUPPRESS

from bench.cell import ROOT, Cell
from quire.serve import LogView, StartError, announce, device_of_worker, find_model, local_url
from quire.settings import ServeSettings
from tests.certificates import Authority
from tests.e2e.test_load import load

TIMEOUT_S = 120


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], exit_code: int, *names: str) -> None:
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for name in names:
        assert name in lines[0]
    assert result.stdout == ""
    assert result.returncode == exit_code


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert_one_line(serve("--port", port), 1, port, "already in use")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("10.1.2.3", "http://10.1.2.3:80"),
    ],
)
def test_server_is_named_by_its_address(host: str, url: str) -> None:
    assert local_url(host, 80) == url


@pytest.mark.parametrize(
    ("device", "num_workers", "devices"),
    [
        ("auto", 1, ["auto"]),
        ("auto", 2, ["auto:0", "auto:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:3", 2, ["cuda:3"] * 2),
        ("cpu", 2, ["cpu"] * 2),
    ],
)
def test_each_worker_has_a_gpu_of_its_own(device: str, num_workers: int, devices: list[str]) -> None:
    assert [device_of_worker(idx, num_workers, device) for idx in range(num_workers)] == devices


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    assert_one_line(serve("--port", "0", "--model", missing), 1, missing)


def test_loader_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(StartError, match=r"finding the model big\.gguf was cut short \(killed by SIGKILL\)"):
        asyncio.run(find_model("big.gguf"))


def test_standard_error_that_takes_nothing_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it fails too
    monkeypatch.setattr(sys, "stderr", full)
    announce("the worker died")
    LogView("info").show_line("worker", "ERROR it died")
    with suppress(OSError):
        full.close()


def test_too_little_memory_names_what_is_needed() -> None:
    result = serve("--port", "0", "--kv-cache-memory", "64TiB")
    assert result.returncode == 1
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, result.stderr
    assert errors[0].startswith("   worker |")
    assert "--kv-cache-memory" in errors[0]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--block-size", "5"), "--block-size"),
        (("--tensor-parallel-size", "4"), "--tensor-parallel-size"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--redis-url", "cache:6379"), "--redis-url"),
        (("--kv-cache-dtype", "fp4"), "--kv-cache-dtype"),
        (("--kv-cache-dtype", "int8", "--kv-formats", "native"), "--kv-formats"),
        (("--kv-cache-dtype", "fp16"), "--kv-cache-dtype"),
        (("--tls-cert", "cell.pem"), "--tls-cert needs --tls-key too"),
        (("--tls-cert", "/no/cell.pem", "--tls-key", "/no/cell.key"), "--tls-cert /no/cell.pem: No such file"),
    ],
)
def test_wrong_flag_is_named(flags: tuple[str, ...], names: str) -> None:
    assert_one_line(serve(*flags), 2, names)


def test_help_shows_every_flag_with_what_it_is_and_its_default() -> None:
    result = serve("--help")
    assert (result.returncode, result.stderr) == (0, "")
    shown = " ".join(result.stdout.split())
    fields = {name: field for name, field in ServeSettings.model_fields.items() if CLI_SUPPRESS not in field.metadata}
    assert {"model", "port", "max_num_seqs", "kv_cache_dtype"} <= fields.keys()
    for name, field in fields.items():
        flag = name.replace("_", "-")
        assert field.description, flag
        # A line that is too long may be broken behind a hyphen.
        of_flag = rf"--{flag}[ ,].*?{re.escape(field.description)} \(default: ".replace("-", "-\\s?")
        assert re.search(of_flag, shown), flag


def test_ctrl_c_stops_every_process_with_exit_code_0() -> None:
    cell = Cell(kv_cache_memory="64MiB")
    processes = psutil.Process(cell.process.pid).children(recursive=True)
    assert len(processes) >= 3
    assert cell.stop() == 0
    assert not any(process.is_running() for process in processes)
    assert cell.severe_lines() == []
    cell.close()


def test_cell_with_certificates_and_keys_answers_those_with_a_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    keys = tmp_path / "keys"
    made = subprocess.run(
        [sys.executable, "-m", "quire", "key", "acme", "--add", str(keys)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    flags = authority.issue("cell").flags(authority)
    with Cell(kv_cache_memory="64MiB", api_keys_file=str(keys), **flags) as cell:
        with OpenAI(base_url=f"{cell.url}/v1", api_key=made.stdout.strip(), max_retries=0) as client:
            model = client.models.list().data[0].id
            answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
        loaded = load(cell.url, "--api-key", made.stdout.strip())
        assert loaded.returncode == 0, loaded.stderr
        client = OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(AuthenticationError):
            client.models.list()
        assert cell.severe_lines() == []
