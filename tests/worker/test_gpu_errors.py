"""What a GPU, its driver or its compiler refuses while a worker starts is one line; our own mistakes are not hidden."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protos.settings import read_settings
from worker_svc import assembly
from worker_svc.errors import StartupError
from worker_svc.gpu_errors import told_in_one_line
from worker_svc.settings import WorkerSettings


def run(action: Callable[[], object]) -> None:
    with told_in_one_line():
        action()


def throw(error: Exception) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore words."),
            r"memory does not suffice: .*--max-num-seqs.* \(CUDA out of memory. Tried to allocate 2 GiB.\)$",
        ),
        (torch.AcceleratorError("CUDA error: unspecified launch failure\nMore words."), "^the GPU failed: .* failure$"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."), "^the GPU failed: .*ALLOC_FAILED"),
    ],
)
def test_what_the_gpu_refuses_is_one_line(error: Exception, words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        run(throw(error))
    assert "More words" not in str(caught.value)


def test_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = pytest.importorskip("triton.runtime.build", reason="Triton is for Linux")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match=r"needs a C compiler and Python's headers\): Failed to find C compiler"):
        run(lambda: build._find_compiler.__wrapped__("c"))


def test_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = pytest.importorskip("triton.runtime.build", reason="Triton is for Linux")
    monkeypatch.setattr(build, "_find_compiler", lambda _language: sys.executable)
    (tmp_path / "main.c").write_text("raise SystemExit(3)")
    with pytest.raises(StartupError, match=r"C compiler and Python's headers.* exit status 3"):
        run(lambda: build._build("main", str(tmp_path / "main.c"), str(tmp_path), [], [], [], []))


def test_mistakes_of_our_own_keep_their_traceback() -> None:
    for error in (ValueError("a bug"), RuntimeError("a bug"), subprocess.CalledProcessError(1, "a bug")):
        with pytest.raises(type(error), match="a bug"):
            run(throw(error))


def test_loading_a_worker_tells_what_the_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "find_gpus", throw(torch.AcceleratorError("CUDA error: no kernel image")))
    with pytest.raises(StartupError, match=r"^the GPU failed: CUDA error: no kernel image$"):
        assembly.load_worker(read_settings(WorkerSettings, []))
