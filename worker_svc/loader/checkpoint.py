"""The weights of a Hugging Face model folder, memory-mapped.

A folder holds either one `model.safetensors` or several shards and `model.safetensors.index.json`, which says where
each tensor lies. All headers are checked when a checkpoint is opened, so that a shard that is missing or cut short is
an error before the first tensor is read; the tensors' bytes come from disk only when they are used.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker_svc.loader.errors import CheckpointError, MissingTensorError
from worker_svc.loader.folder import INDEX_FILE, read_index, weight_paths


class Checkpoint:
    """The named tensors of one model folder.

    Raises CheckpointError, which names the file, when weights are absent, incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = weight_paths(folder)
        shards = {path.name: _open_shard(path) for path in paths}
        self._shard_of: dict[str, Any] = {name: shard for shard in shards.values() for name in shard.keys()}  # noqa: SIM118
        for name, shard_name in read_index(folder).items():
            if name not in self._shard_of:
                raise MissingTensorError(f"{folder / shard_name} has no tensor {name}, though {INDEX_FILE} says so")

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._shard_of)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor `name` on the CPU in its stored dtype; its bytes stay in the mapped file.

        Raises MissingTensorError when there is none.
        """
        shard = self._shard_of.get(name)
        if shard is None:
            raise MissingTensorError(f"the weights in {self.folder} have no tensor {name}")
        tensor: torch.Tensor = shard.get_tensor(name)
        return tensor


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(f"damaged weights file {path}: {error}") from error
