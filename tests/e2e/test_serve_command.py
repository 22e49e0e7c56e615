"""`quire serve` from the outside: mistakes are one clear line and leave nothing running."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.cell import ROOT, Cell

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


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    assert_one_line(serve("--port", "0", "--model", missing), 1, missing)


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
        (("--kv-cache-dtype", "fp4"), "'fp4' is not a KV cache dtype"),
    ],
)
def test_wrong_flag_is_named(flags: tuple[str, ...], names: str) -> None:
    assert_one_line(serve(*flags), 2, names)


def test_ctrl_c_stops_every_process_with_exit_code_0() -> None:
    cell = Cell(kv_cache_memory="64MiB")
    processes = psutil.Process(cell.process.pid).children(recursive=True)
    assert len(processes) >= 3
    assert cell.stop() == 0
    assert not any(process.is_running() for process in processes)
    assert cell.severe_lines() == []
    cell.close()
