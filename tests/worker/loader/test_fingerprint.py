"""What a model's fingerprint depends on."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker_svc.loader.errors import ModelError
from worker_svc.loader.fingerprint import fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, path / "model.safetensors")
    return path


def test_copies_share_a_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    assert fingerprint(copy) == fingerprint(folder)
    assert len(fingerprint(folder)) == 32


def test_config_counts(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "config.json").write_text('{"rope_theta": 2}')
    assert fingerprint(folder) != before


def test_weights_count(folder: Path) -> None:
    before = fingerprint(folder)
    save_file({"a": torch.ones(4)}, folder / "model.safetensors")
    assert fingerprint(folder) != before


def test_tokenizer_does_not_count(folder: Path) -> None:
    before = fingerprint(folder)
    (folder / "tokenizer.json").write_text('{"version": "2"}')
    assert fingerprint(folder) == before


def test_missing_config_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        fingerprint(folder)
