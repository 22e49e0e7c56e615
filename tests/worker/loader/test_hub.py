"""Models from a Hub: only the needed files, a copy for later, and one line for each way to fail.

The client reads its address from the environment once, so each case is a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.worker.loader.fake_hub import COMMIT, FakeHub, serving

REPOSITORY = "owner/tiny"
NEEDED = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
}
OTHERS = {
    "README.md": b"# tiny",
    "pytorch_model.bin": b"the same again",
    "consolidated.safetensors": b"and again",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"and again",
}


def load(url: str, home: Path, model: str = REPOSITORY) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "worker_svc.loader", model],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_the_needed_files_are_fetched(tmp_path: Path) -> None:
    with serving(FakeHub(REPOSITORY, {**NEEDED, **OTHERS})) as hub:
        result = load(hub.url, tmp_path)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.removesuffix("\n"))
    assert hub.fetched == NEEDED.keys()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED


def test_copy_is_used_when_the_hub_is_gone(tmp_path: Path) -> None:
    with serving(FakeHub(REPOSITORY, NEEDED)) as hub:
        first = load(hub.url, tmp_path)
    second = load(hub.url, tmp_path)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert Path(first.stdout.removesuffix("\n")).name == COMMIT


@pytest.mark.parametrize(
    ("files", "gated", "model", "message"),
    [
        (NEEDED, False, "owner/other", "owner/other is neither a local folder nor on the Hugging Face Hub"),
        (NEEDED, True, REPOSITORY, "owner/tiny needs its licence accepted at https://huggingface.co/owner/tiny"),
        (OTHERS, False, REPOSITORY, "owner/tiny on the Hugging Face Hub has no config.json with model.safetensors"),
    ],
    ids=["unknown", "gated", "no-safetensors"],
)
def test_failure_is_one_line(tmp_path: Path, files: Mapping[str, bytes], gated: bool, model: str, message: str) -> None:
    with serving(FakeHub(REPOSITORY, files, gated=gated)) as hub:
        result = load(hub.url, tmp_path, model)
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"error: {message}")
