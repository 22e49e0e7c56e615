"""What a step asks of the device: a forward pass and block operations. `ModelCompute` is the real thing."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.dispatch import Backend
from worker_svc.arena_plan import ArenaPlan
from worker_svc.batch import StepBatch
from worker_svc.graphs import DecodeGraphs, ForwardInputs, bucket_for
from worker_svc.models.decoder import Decoder
from worker_svc.staging import InputTransfer, SharedInputs, send_batch, to_device


class Compute(Protocol):
    """The device as a step sees it. Called from one thread."""

    def forward(self, batch: StepBatch) -> Tensor:
        """Write the KV of all the batch's tokens; return logits of its S sampling tokens, float32 [S, vocab]."""

    def zero_blocks(self, entries: Sequence[int]) -> None:
        """Fill blocks with zeros, in all layers."""

    def copy_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """Copy blocks, in all layers."""

    def requantize_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """Write blocks anew in narrower formats, in all layers."""

    def wait(self) -> None:
        """Wait until the device has done all that it was asked for."""


class ModelCompute:
    """A decoder, its arena, and the kernels between them.

    On a GPU all work is queued in one stream and nothing here waits for it: what is read back from the logits does, or
    `wait`.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        plan: ArenaPlan,
        arena: Tensor,
        inputs: InputTransfer | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Serve `arena`; without `inputs` the arrays' own memory is read, without `graphs` every step is launched."""
        self.plan = plan
        self._decoder = decoder
        self._backend = backend
        self._layout = plan.layout
        self._arena = arena
        self._device = arena.device
        self._inputs: InputTransfer = inputs or SharedInputs()
        self._graphs = graphs

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Run the decoder; see Compute."""
        bucket = None if self._graphs is None else bucket_for(batch, self._graphs.buckets)
        if self._graphs is None or bucket is None:
            hidden = self._launch(batch)
        else:
            all_hidden, sampling_token_idxs = self._graphs.run(batch, bucket)
            hidden = all_hidden.index_select(0, sampling_token_idxs)
        return self._decoder.compute_logits(hidden)

    @torch.inference_mode()
    def record_graphs(self, graphs: DecodeGraphs, buckets: Sequence[int]) -> None:
        """Record decode steps of these numbers of rows, and run such steps by their graphs from now on.

        They write to slot -1 alone, that is nowhere.
        """
        graphs.record_all(self._run_decoder, buckets)
        self._graphs = graphs

    @torch.inference_mode()
    def record_graph(self, graphs: DecodeGraphs, bucket: int) -> None:
        """Record decode steps of one number of rows, to see what it takes. Raises as graphs.Recorder does."""
        graphs.record(self._run_decoder, bucket)

    def zero_blocks(self, entries: Sequence[int]) -> None:
        """See Compute."""
        self._backend.zero_blocks(self._arena, self._entries(entries), self._layout)

    def copy_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """See Compute."""
        self._backend.copy_blocks(self._arena, self._entries(src_entries), self._entries(dst_entries), self._layout)

    def requantize_blocks(self, src_entries: Sequence[int], dst_entries: Sequence[int]) -> None:
        """See Compute."""
        sources, destinations = self._entries(src_entries), self._entries(dst_entries)
        self._backend.requantize_blocks(self._arena, sources, destinations, self._layout)

    def wait(self) -> None:
        """See Compute."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch(self, batch: StepBatch) -> Tensor:
        """Launch every kernel of a step; return the hidden states [S, H] of its sampling tokens."""
        sent = send_batch(self._inputs, batch)
        return self._run_decoder(
            ForwardInputs.of(sent, sent.block_table, batch.max_query_len), sent.sampling_token_idxs
        )

    def _run_decoder(self, inputs: ForwardInputs, wanted: Tensor | None = None) -> Tensor:
        return self._decoder.forward(
            inputs.token_ids,
            inputs.positions,
            self._arena,
            inputs.attention,
            inputs.slot_mapping,
            self._backend,
            self._layout,
            wanted,
        )

    def _entries(self, entries: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(entries, dtype=torch.int32), self._device)
