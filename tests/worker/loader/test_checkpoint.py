"""Reading weights from model folders, whole and broken."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.errors import CheckpointError, MissingTensorError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "b": torch.tensor([0.5, -0.25]),
    "c": torch.full((5,), 7, dtype=torch.float16),
}


def write_single(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    save_file({"a": TENSORS["a"]}, folder / FIRST)
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_every_tensor_is_read_as_stored(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    checkpoint = Checkpoint(write(tmp_path))
    assert checkpoint.names() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert checkpoint.tensor(name).dtype == expected.dtype
        assert torch.equal(checkpoint.tensor(name), expected)


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"only": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).names() == {"only"}


def test_unknown_tensor_is_named_with_the_folder(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_single(tmp_path))
    with pytest.raises(MissingTensorError, match=r"have no tensor lm_head\.weight") as caught:
        checkpoint.tensor("lm_head.weight")
    assert str(tmp_path) in str(caught.value)


def test_missing_shard_is_named_when_opening(tmp_path: Path) -> None:
    (write_sharded(tmp_path) / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"missing weights file .*{SECOND}"):
        Checkpoint(tmp_path)


def test_tensor_that_only_the_index_has_is_named_when_opening(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": FIRST, "b": SECOND, "c": SECOND, "d": SECOND})
    with pytest.raises(MissingTensorError, match=f"{SECOND} has no tensor d"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 40, -1])
def test_weights_file_cut_short_is_named_when_opening(tmp_path: Path, kept_bytes: int) -> None:
    path = write_sharded(tmp_path) / FIRST
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=f"damaged weights file .*{FIRST}") as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights in") as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "contents", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "../x.safetensors"}}']
)
def test_damaged_index_is_named(tmp_path: Path, contents: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(contents)
    with pytest.raises(CheckpointError, match=r"damaged weights index .*model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)
