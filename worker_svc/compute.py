"""What a step asks of the device: a forward pass and block operations. `ModelCompute` is the real thing."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch, Backend
from worker_svc.batch import StepBatch
from worker_svc.kv import ArenaPlan
from worker_svc.models.decoder import Decoder


class Compute(Protocol):
    """The device as a step sees it. Called from one thread."""

    def forward(self, batch: StepBatch) -> Tensor:
        """Write the KV of all the batch's tokens; return logits of its S sampling tokens, float32 [S, vocab]."""

    def zero_blocks(self, entries: Sequence[int]) -> None:
        """Fill blocks with zeros, in all layers."""

    def copy_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """Copy blocks, in all layers."""


class ModelCompute:
    """A decoder, its arena, and the kernels between them."""

    def __init__(self, decoder: Decoder, backend: Backend, plan: ArenaPlan, arena: Tensor) -> None:
        self._decoder = decoder
        self._backend = backend
        self._layout = plan.layout
        self._arena = arena
        self._device = arena.device

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Run the decoder; see Compute."""
        attention = AttentionBatch(
            block_table=self._tensor(batch.block_table),
            context_lens=self._tensor(batch.context_lens),
            cu_seqlens_q=self._tensor(batch.cu_seqlens_q),
            max_query_len=batch.max_query_len,
        )
        hidden = self._decoder.forward(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            self._arena,
            attention,
            self._tensor(batch.slot_mapping),
            self._backend,
            self._layout,
        )
        return self._decoder.compute_logits(hidden[self._tensor(batch.sampling_token_idxs)])

    def zero_blocks(self, entries: Sequence[int]) -> None:
        """See Compute."""
        self._backend.zero_blocks(self._arena, self._entries(entries), self._layout)

    def copy_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """See Compute."""
        self._backend.copy_blocks(self._arena, self._entries(src_entries), self._entries(dst_entries), self._layout)

    def _entries(self, entries: Sequence[int]) -> Tensor:
        return torch.tensor(entries, dtype=torch.int32, device=self._device)

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
