"""How a step's arrays get to the device: on a CPU as they are, on a GPU through pinned memory in one copy.

A copy from pageable memory makes the host wait until it is done, and each copy costs a launch. So all arrays of a step
are packed into one page-locked buffer, which one asynchronous copy brings over; the device sees views of it:

    host     | token_ids | positions | slot_mapping | ... | block_table |      one of two buffers, in turn
                                    │ one copy
    device   | token_ids | positions | slot_mapping | ... | block_table |      one buffer

A host buffer is written again only when an event says that its last copy is done. The device buffer needs none: the
next copy waits in the same stream behind the step that reads the last one. Where an array begins depends on the sizes
of those before it alone, so equal shapes lie at equal addresses: what a CUDA graph needs of its inputs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.batch import StepBatch

Array = npt.NDArray[np.generic]

_ALIGNMENT_BYTES = 16  # as kernels load
_NUM_HOST_BUFFERS = 2  # one is written while the other is copied
_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class InputTransfer(Protocol):
    """The way of a step's arrays to the device."""

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arrays as tensors on the device, valid until the next call; each is int32 or int64."""


class SharedInputs:
    """For CPUs: tensors over the arrays' own memory, which live as long as the tensors."""

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """See InputTransfer."""
        return [torch.from_numpy(array) for array in arrays]


class Event(Protocol):
    """A point in a device's stream, as torch.cuda.Event marks it."""

    def record(self) -> None:
        """Mark what was queued until now."""

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""


class PinnedInputs:
    """For GPUs: see the module. One thread alone may use it."""

    def __init__(
        self,
        capacity_bytes: int,
        device: torch.device,
        allocate_host: Callable[[int], Tensor],
        make_event: Callable[[], Event],
    ) -> None:
        self._device_buffer = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._host_buffers = [_HostBuffer(allocate_host(capacity_bytes), make_event) for _ in range(_NUM_HOST_BUFFERS)]
        self._turn = 0

    @classmethod
    def on_gpu(cls, capacity_bytes: int, device: torch.device) -> "PinnedInputs":
        """Return one for a GPU."""

        def allocate_host(num_bytes: int) -> Tensor:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

        return cls(capacity_bytes, device, allocate_host, torch.cuda.Event)

    def send(self, arrays: Sequence[Array]) -> list[Tensor]:
        """See InputTransfer. Together they take at most the capacity, by `packed_bytes`."""
        host = self._host_buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._host_buffers)
        offsets, total_bytes = _pack([array.nbytes for array in arrays])
        assert total_bytes <= len(self._device_buffer)
        host.fill(arrays, offsets)
        self._device_buffer[:total_bytes].copy_(host.tensor[:total_bytes], non_blocking=True)
        host.mark()
        return [self._view(array, offset) for array, offset in zip(arrays, offsets, strict=True)]

    def _view(self, array: Array, offset: int) -> Tensor:
        raw = self._device_buffer[offset : offset + array.nbytes]
        return raw.view(_TORCH_DTYPES[array.dtype]).view(array.shape)


class _HostBuffer:
    """Page-locked memory, and the event behind the last copy out of it."""

    def __init__(self, tensor: Tensor, make_event: Callable[[], Event]) -> None:
        self.tensor = tensor
        self._bytes = tensor.numpy()
        self._copied = make_event()
        self._is_copying = False

    def fill(self, arrays: Sequence[Array], offsets: Iterable[int]) -> None:
        """Write the arrays, when the device no longer reads what was there."""
        if self._is_copying:
            self._copied.synchronize()
        for array, offset in zip(arrays, offsets, strict=True):
            target = self._bytes[offset : offset + array.nbytes].view(array.dtype)
            np.copyto(target.reshape(array.shape), array)

    def mark(self) -> None:
        """Remember that a copy was just queued."""
        self._copied.record()
        self._is_copying = True


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of main memory on the device, through page-locked memory of torch's own on a GPU.

    So the host goes on at once; from pageable memory it would wait for all that is queued before the copy.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A step's arrays on the device, as StepBatch describes them: R rows, T tokens, S of the rows sample."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    context_lens: Tensor  # int32 [R]
    cu_seqlens_q: Tensor  # int32 [R + 1]
    sampling_token_idxs: Tensor  # int64 [S]
    block_table: Tensor  # int32 [R, max_blocks]


def send_batch(inputs: InputTransfer, batch: StepBatch) -> SentBatch:
    """Send a step's arrays. What a decode graph reads comes first: it lies where the number of rows alone says."""
    return SentBatch(
        *inputs.send(
            (
                batch.token_ids,
                batch.positions,
                batch.slot_mapping,
                batch.context_lens,
                batch.cu_seqlens_q,
                batch.sampling_token_idxs,
                batch.block_table,
            )
        )
    )


def batch_bytes(num_tokens: int, num_rows: int, max_blocks: int) -> int:
    """Return the bytes that `send_batch` takes for so many rows, all of which sample."""
    return packed_bytes(
        [8 * num_tokens] * 3 + [4 * num_rows, 4 * (num_rows + 1), 8 * num_rows, 4 * num_rows * max_blocks]
    )


def packed_bytes(array_bytes: Iterable[int]) -> int:
    """Return the bytes that arrays of these sizes take when they are packed."""
    return _pack(array_bytes)[1]


def _pack(array_bytes: Iterable[int]) -> tuple[list[int], int]:
    """Return where each array begins, and the bytes of all."""
    offsets, end = [], 0
    for num_bytes in array_bytes:
        offsets.append(end)
        end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end
