import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu import runtime
from kernels.dispatch import Backend
from tests.kernels.cases import attention, make_case

_COUNT = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


def test_one_openmp_runtime_in_the_process(cpu: Backend) -> None:
    attention(cpu, make_case())
    assert len(runtime.loaded_openmp_runtimes()) <= 1


@pytest.mark.parametrize("parallel", [runtime.pool_parallel, runtime._parallel_call()])
def test_body_runs_once_on_every_thread(parallel: runtime.ParallelCall) -> None:
    together, threads = threading.Barrier(3), set()

    def body(argument: int) -> None:
        threads.add(threading.get_ident())
        assert argument == 42
        together.wait(timeout=60)

    callback = _COUNT(body)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    parallel(address, 42, 3, 0)
    assert len(threads) == 3


def test_attention_without_gomp_parallel(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    wanted = attention(cpu, case)
    monkeypatch.setattr(runtime, "_parallel_call", lambda: runtime.pool_parallel)
    assert torch.equal(attention(cpu, case), wanted)


def test_compiled_code_is_cached_under_a_key(tmp_path: Path) -> None:
    code = "import os, kernels.cpu.runtime; print(os.environ['NUMBA_CACHE_DIR'])"
    folder = Path(run_python(code, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR=""))
    assert folder.parent == tmp_path / "quire" / "numba"
    assert folder.is_dir()


@pytest.mark.parametrize("name", ["formats.py", "cpu/tiles.py"])
def test_key_changes_with_every_source_that_is_compiled_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "cpu" / "runtime.py"))
    (tmp_path / name).write_text("LEVELS = 127")
    before = runtime._cache_folder()
    assert runtime._cache_folder() == before
    (tmp_path / name).write_text("LEVELS = 7")
    assert runtime._cache_folder() != before


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    code = """
from kernels.cpu.blocks import check_entries
check_entries(0, 0, 1, 1, 1)
print(sum(check_entries.stats.cache_hits.values()), sum(check_entries.stats.cache_misses.values()))
"""
    # Sets and dicts of strings have another order under another hash seed, which every process draws for itself.
    hits_and_misses = [
        run_python(code, XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR="", PYTHONHASHSEED=seed) for seed in ("1", "2")
    ]
    assert hits_and_misses == ["0 1", "1 0"]


def test_cache_folder_that_cannot_be_made_is_replaced(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    code = "import os, kernels.cpu.runtime; print(os.environ['NUMBA_CACHE_DIR'])"
    folder = Path(run_python(code, XDG_CACHE_HOME=str(blocked), NUMBA_CACHE_DIR=""))
    assert folder.is_dir()
    folder.rmdir()


def test_cache_folder_of_the_user_stays(tmp_path: Path) -> None:
    code = "import os, kernels.cpu.runtime; print(os.environ['NUMBA_CACHE_DIR'])"
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == str(tmp_path)
