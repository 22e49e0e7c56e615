"""Reading a checkpoint's tensors with their shapes checked, so that a wrong file ends in a sentence, not in a crash."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker_svc.models.errors import TensorError

# A buffer that old checkpoints carry and every reader computes itself.
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


class TensorSource(Protocol):
    """A checkpoint as the models see it."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its Hugging Face name, maybe memory-mapped; raise an error that names it if absent."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""


class WeightReader:
    """Takes tensors from a source, each with the shape that it must have, and remembers which were taken."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the checkpoint's dtype; raises TensorError where its shape is not `shape`.

        It may be a view of a mapped file: whoever keeps it copies it.
        """
        tensor = self._source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise TensorError(f"tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        if not tensor.is_floating_point():
            raise TensorError(f"tensor {name} has dtype {tensor.dtype}: quantized checkpoints are not served")
        self._taken.add(name)
        return tensor

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        """Return tensors (name, rows) of [rows, *columns] on top of each other, as one product needs them."""
        return torch.cat([self.take(name, rows, *columns) for name, rows in parts])

    def ignore(self, name: str) -> None:
        """Let a tensor be present though nobody takes it."""
        self._taken.add(name)

    def check_all_taken(self) -> None:
        """Raise TensorError where the checkpoint holds a tensor that was not taken: it would be silently ignored."""
        left = sorted(
            name for name in self._source.names() if name not in self._taken and not name.endswith(_IGNORED_SUFFIX)
        )
        if left:
            raise TensorError(f"tensor {left[0]} ({len(left)} such) has no place in this architecture")
