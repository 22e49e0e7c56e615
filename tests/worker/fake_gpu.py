"""What stands in for a GPU: figures of its memory, events, step inputs in main memory, kernels that know padding."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, AttentionParams
from kernels.formats import KVLayout
from kernels.reference import ReferenceBackend
from worker_svc.gpu_memory import MemoryReading
from worker_svc.staging import PinnedInputs

CPU = torch.device("cpu")
GIB = 1024**3


@dataclass
class FakeEvent:
    """Notes what is done to it."""

    calls: list[str] = field(default_factory=list)

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("wait")


def inputs_in_main_memory(capacity_bytes: int = 1 << 20, events: Sequence[FakeEvent] = ()) -> PinnedInputs:
    """Return inputs whose device buffer is main memory too; each host buffer takes one of `events`."""
    left = list(events)

    def make_event() -> FakeEvent:
        return left.pop(0) if left else FakeEvent()

    return PinnedInputs(capacity_bytes, CPU, lambda count: torch.empty(count, dtype=torch.uint8), make_event)


@dataclass
class FakeGpu:
    """A GPU's memory. What is taken directly is the driver's; tensors come and go through torch's allocator."""

    total_bytes: int = 100 * GIB
    foreign_bytes: int = 0
    tensor_bytes: int = 0
    cached_bytes: int = 0
    peak_bytes: int = 0

    def allocate(self, num_bytes: int) -> None:
        """Make a tensor."""
        self.tensor_bytes += num_bytes
        self.cached_bytes = max(0, self.cached_bytes - num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.tensor_bytes)

    def free(self, num_bytes: int) -> None:
        """Give a tensor back to torch's allocator, which keeps the memory."""
        self.tensor_bytes -= num_bytes
        self.cached_bytes += num_bytes

    def read(self) -> MemoryReading:
        reserved_bytes = self.tensor_bytes + self.cached_bytes
        free_bytes = self.total_bytes - self.foreign_bytes - reserved_bytes
        return MemoryReading(self.total_bytes, free_bytes, reserved_bytes, self.peak_bytes)

    def reset_peak(self) -> None:
        self.peak_bytes = self.tensor_bytes

    def release_cached(self) -> None:
        self.cached_bytes = 0


class PaddingBackend(ReferenceBackend):
    """The oracle, with what kernels of a GPU promise besides: slot -1 is skipped, a context of 0 gives zeros."""

    def write_kv(self, layer_arena: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor, layout: KVLayout) -> None:
        kept = slot_mapping >= 0
        super().write_kv(layer_arena, key[kept], value[kept], slot_mapping[kept], layout)

    def paged_attention(
        self,
        query: Tensor,
        layer_arena: Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
        layout: KVLayout,
        out: Tensor,
    ) -> None:
        out.zero_()
        rows = (batch.context_lens > 0).nonzero()[:, 0]
        begins = batch.cu_seqlens_q[rows].tolist()
        ends = batch.cu_seqlens_q[rows + 1].tolist()
        for row, begin, end in zip(rows.tolist(), begins, ends, strict=True):
            alone = replace(
                batch,
                block_table=batch.block_table[row : row + 1],
                context_lens=batch.context_lens[row : row + 1],
                cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            )
            super().paged_attention(query[begin:end], layer_arena, alone, params, layout, out[begin:end])
