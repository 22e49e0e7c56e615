"""A step's arrays arrive whole on the device, in memory that nobody still reads."""

import numpy as np
import pytest
import torch

from tests.worker.fake_gpu import FakeEvent, inputs_in_main_memory
from worker_svc.staging import Array, SharedInputs, packed_bytes


def arrays_of(value: int) -> list[Array]:
    return [
        np.full(3, value, dtype=np.int64),
        np.full(5, value + 1, dtype=np.int32),
        np.full((2, 3), value + 2, dtype=np.int32),
        np.zeros(0, dtype=np.int64),
    ]


def test_tensors_equal_the_arrays() -> None:
    inputs = inputs_in_main_memory()
    arrays: list[Array] = [
        np.arange(7, dtype=np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],  # not contiguous, as a slice of a table is not
        np.zeros((0, 4), dtype=np.int32),
        np.array([-1, 2**40]),
    ]
    for array, tensor in zip(arrays, inputs.send(arrays), strict=True):
        assert tensor.shape == array.shape
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0
        assert np.array_equal(tensor.numpy(), array)


def test_arrays_of_equal_shapes_lie_at_equal_addresses_whatever_follows_them() -> None:
    inputs = inputs_in_main_memory()
    first = [tensor.data_ptr() for tensor in inputs.send([*arrays_of(1), np.zeros((4, 9), dtype=np.int32)])]
    second = [tensor.data_ptr() for tensor in inputs.send([*arrays_of(2), np.zeros((1, 2), dtype=np.int32)])]
    assert first[:3] == second[:3]


def test_host_buffer_is_written_only_when_its_last_copy_is_done() -> None:
    events = [FakeEvent(), FakeEvent()]
    inputs = inputs_in_main_memory(events=events)
    for step in range(5):
        inputs.send(arrays_of(step))
    # In turn, and each waits for its own copy before the next one.
    assert events[0].calls == ["record", "wait", "record", "wait", "record"]
    assert events[1].calls == ["record", "wait", "record"]


def test_more_than_the_capacity_is_our_mistake() -> None:
    arrays = arrays_of(0)
    capacity_bytes = packed_bytes(array.nbytes for array in arrays)
    assert capacity_bytes == 32 + 32 + 32
    inputs_in_main_memory(capacity_bytes).send(arrays)
    with pytest.raises(AssertionError):
        inputs_in_main_memory(capacity_bytes - 1).send(arrays)


def test_a_cpu_reads_the_arrays_themselves() -> None:
    array = np.arange(4)
    (tensor,) = SharedInputs().send([array])
    array[2] = 9
    assert torch.equal(tensor, torch.tensor([0, 1, 9, 3]))
