"""Decode steps as recorded graphs, one for each bucket of batch sizes.

A decode step of few rows is so short that the host cannot launch its hundreds of kernels as fast as the device runs
them. A CUDA graph replays them all with one launch, but on the very addresses and shapes with which it was recorded. So
a step whose rows all decode one token is padded to the next bucket and runs on inputs at fixed addresses:

    rows 0 .. R-1      the step's, in its order
    rows R .. bucket-1 one token each with slot -1, which write_kv skips, and context 0, for which attention gives zeros

Tables have the width of the longest sequence that there may be; kernels read a row's table as far as its context goes.
What a graph holds ends with the hidden states: the head and the sampler come after it, launched while it runs.

Every other step (a prefill chunk in it, or more rows than the largest bucket) is launched kernel by kernel.
"""

import bisect
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.dispatch import AttentionBatch
from worker_svc.batch import StepBatch
from worker_svc.gpu_errors import first_line
from worker_svc.staging import InputTransfer, SentBatch, send_batch

logger = logging.getLogger(__name__)

PADDING_SLOT = -1
MAX_BUCKET = 512  # rows; a step of more is long enough to launch its kernels one by one

_NUM_LOGGED = 8  # progress lines
_Scalar = TypeVar("_Scalar", bound=np.generic)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows for which graphs are recorded, ascending: 1, 2, 4, 8, 16, 24 ... to `max_num_seqs`.

    Steps of 8 up to 256 rows keep the padding small where a row costs most; above, 16.
    """
    largest = min(max_num_seqs, MAX_BUCKET)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, MAX_BUCKET + 1, 16)]
    return (*(size for size in sizes if size < largest), largest)


def bucket_for(batch: StepBatch, buckets: Sequence[int]) -> int | None:
    """Return the smallest bucket (of ascending ones) that holds a batch; None when it must run without a graph."""
    num_rows = len(batch.context_lens)
    if batch.max_query_len != 1 or len(batch.token_ids) != num_rows or not buckets or num_rows > buckets[-1]:
        return None
    return buckets[bisect.bisect_left(buckets, num_rows)]


def pad_decode(batch: StepBatch, num_rows: int) -> StepBatch:
    """Return a batch of decoding rows with rows after them that compute nothing; its block table stays as it is."""
    return replace(
        batch,
        token_ids=_extended(batch.token_ids, num_rows, 0),
        positions=_extended(batch.positions, num_rows, 0),
        slot_mapping=_extended(batch.slot_mapping, num_rows, PADDING_SLOT),
        context_lens=_extended(batch.context_lens, num_rows, 0),
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
    )


def _extended(array: npt.NDArray[_Scalar], length: int, value: int) -> npt.NDArray[_Scalar]:
    extended = np.full(length, value, dtype=array.dtype)
    extended[: len(array)] = array
    return extended


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What the decoder takes of a step, on the device."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    attention: AttentionBatch

    @classmethod
    def of(cls, sent: SentBatch, block_table: Tensor, max_query_len: int) -> "ForwardInputs":
        """Return those of a batch, with a table of its rows that may be another one than the batch's own."""
        attention = AttentionBatch(block_table, sent.context_lens, sent.cu_seqlens_q, max_query_len)
        return cls(sent.token_ids, sent.positions, sent.slot_mapping, attention)


Forward = Callable[[ForwardInputs], Tensor]  # returns hidden states [T, H]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded call."""

    output: Tensor  # the same at every replay
    replay: Callable[[], None]


class Recorder(Protocol):
    """What makes recordings."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Run a call, and record it on the tensors that it uses now.

        Raises torch.OutOfMemoryError, or torch.AcceleratorError when it is the driver that has no memory.
        """


class CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool: no two of them run at once."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Record on `stream`, for which libraries keep a work space as long as the process lives."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """See Recorder."""
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(before)
        # The outer block gives the thread its stream back when a recording fails at its end: torch's own does not.
        with torch.cuda.stream(self._stream):
            # Kernels are compiled and libraries get their work space at the first run: not for a recording.
            run()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = run()
        before.wait_stream(self._stream)
        return Recording(output, graph.replay)


class RerunRecorder:
    """For devices without graphs: replays by running the call again, so that all but the graph can run anywhere."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """See Recorder."""
        output = run()

        def replay() -> None:
            output.copy_(run())

        return Recording(output, replay)


class DecodeGraphs:
    """The recordings, their inputs, and the way of a step through them. One thread alone may use it."""

    def __init__(
        self, recorder: Recorder, inputs: InputTransfer, max_rows: int, max_blocks: int, device: torch.device
    ) -> None:
        self._recorder = recorder
        self._inputs = inputs
        # Tables are too large to be sent in full at every step: the columns in use come packed, and are spread here.
        self._block_table = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self._recordings: dict[int, Recording] = {}
        self.buckets: tuple[int, ...] = ()

    def record(self, forward: Forward, bucket: int) -> None:
        """Record a forward of so many rows. Raises as Recorder does."""
        with _no_collection():
            self._record(forward, bucket)

    def record_all(self, forward: Forward, buckets: Sequence[int]) -> None:
        """Record a forward for each bucket, the largest first: the smaller ones fit into its memory.

        When memory runs out, the buckets recorded until then stay.
        """
        descending = sorted(buckets, reverse=True)
        logged_every = -(-len(descending) // _NUM_LOGGED)
        with _no_collection():
            for idx, bucket in enumerate(descending):
                if idx % logged_every == 0:
                    logger.info("recording graph %d of %d: decode of %d rows", idx + 1, len(descending), bucket)
                try:
                    self._record(forward, bucket)
                except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
                    logger.warning("no graphs of %d rows and fewer can be recorded: %s", bucket, first_line(error))
                    break

    def run(self, batch: StepBatch, bucket: int) -> tuple[Tensor, Tensor]:
        """Run a batch of at most `bucket` decoding rows, a recorded size.

        Returns hidden states [bucket, H], of which the first rows are the batch's, valid until the next run; and the
        batch's sampling_token_idxs on the device.
        """
        recording = self._recordings[bucket]
        sent = send_batch(self._inputs, pad_decode(batch, bucket))
        num_rows, width = sent.block_table.shape
        self._block_table[:num_rows, :width].copy_(sent.block_table)
        recording.replay()
        return recording.output, sent.sampling_token_idxs

    def _record(self, forward: Forward, bucket: int) -> None:
        sent = send_batch(self._inputs, pad_decode(_empty_decode(), bucket))
        inputs = ForwardInputs.of(sent, self._block_table[:bucket], max_query_len=1)
        self._recordings[bucket] = self._recorder.record(lambda: forward(inputs))
        self.buckets = tuple(sorted(self._recordings))


def _empty_decode() -> StepBatch:
    """Return a batch without rows."""
    none_32, none_64 = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    return StepBatch(
        token_ids=none_64,
        positions=none_64,
        slot_mapping=none_64,
        block_table=np.zeros((0, 1), dtype=np.int32),
        context_lens=none_32,
        cu_seqlens_q=np.zeros(1, dtype=np.int32),
        max_query_len=1,
        written_entries=none_64,
        sampling_slots=none_64,
        sampling_token_idxs=none_64,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away in the block: what it frees may call the driver, which spoils a recording."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
