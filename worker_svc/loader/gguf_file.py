"""A GGUF file's typed metadata and quantized tensors.

The `gguf` library reads them; what this adds is errors that name the file and the key or tensor.
"""

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from worker_svc.loader.errors import GgufError

T = TypeVar("T")


class _Reader(GGUFReader):
    """The library's reader on a plain array.

    It cuts the file in hundreds of thousands of slices, and each costs three times as much on numpy's memmap class.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


class GgufFile:
    """An open GGUF file. Its tensors are memory-mapped.

    Raises GgufError, here and in every method, with the file's path and what is missing or unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            # The reader does not check lengths: a file cut short shows as whatever numpy makes of too few bytes.
            raise GgufError(f"damaged or unsupported GGUF file {path}: {error}") from error
        if self._reader.byte_order != "I":
            raise GgufError(f"{path} is in the other byte order than this machine's")
        parts = self.integer("split.count", 1)
        if parts > 1:
            raise GgufError(f"{path} is one of {parts} parts: join them first (llama-gguf-split --merge)")
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.string("general.architecture")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; a missing key without a default is an error."""
        return self._value(key, default, int)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float. A 32-bit one becomes the shortest decimal that rounds to it: 1e-05, not 9.999999747e-06."""
        return float(str(np.float32(self._value(key, default, float))))

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; a missing key without a default is an error."""
        return self._value(key, default, bool)

    def string(self, key: str, default: str | None = None) -> str:
        """Return a string; a missing key without a default is an error."""
        return self._value(key, default, str)

    def array(self, key: str) -> list[Any]:
        """Return a list; a missing key is an error."""
        return self._value(key, None, list)

    def has(self, key: str) -> bool:
        """Return whether the metadata has `key`."""
        return key in self._reader.fields

    def dequantized(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tensor in float32, its shape in the order that torch uses (outermost first)."""
        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise GgufError(
                f"{self.path}: tensor {name} is in {tensor.tensor_type.name}, which is not supported"
            ) from error
        return np.asarray(values, dtype=np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as torch has it, which is GGUF's in reverse."""
        return tuple(int(length) for length in reversed(self.tensors[name].shape))

    def _value(self, key: str, default: T | None, kind: type[T]) -> T:
        field = self._reader.fields.get(key)
        if field is None and default is not None:
            return default
        if field is None:
            raise GgufError(f"{self.path}: the metadata has no {key}")
        try:
            value = field.contents()
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.path}: {key} is not UTF-8") from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise GgufError(f"{self.path}: {key} should be of type {kind.__name__}, and is {str(value)[:60]}")
        return value
