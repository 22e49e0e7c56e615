"""Which steps run as a graph, how they are padded, and that padding changes no row's logits."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from protos import worker_pb2 as pb
from tests.worker.fake_gpu import CPU, PaddingBackend, inputs_in_main_memory
from tests.worker.fakes import LAYOUT, continued, entries_of, make_mirror, new_row
from tests.worker.models.checkpoints import VOCAB_SIZE, save
from worker_svc.arena_plan import ArenaPlan
from worker_svc.batch import StepBatch, build_batch
from worker_svc.compute import ModelCompute
from worker_svc.graphs import (
    PADDING_SLOT,
    DecodeGraphs,
    Recording,
    RerunRecorder,
    bucket_for,
    decode_buckets,
    pad_decode,
)
from worker_svc.mirror import Mirror
from worker_svc.models.decoder import Decoder
from worker_svc.profiling import decode_batch

MAX_MODEL_LEN = 64
BLOCK_SIZE = 8
MAX_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE + 1


def decoding(*prompt_lengths: int) -> Mirror:
    """Return a mirror of rows that have computed their prompts and have one token to decode each."""
    mirror = make_mirror(max_num_seqs=8, max_model_len=MAX_MODEL_LEN)
    rows, next_block = [], 0
    for seq_id, length in enumerate(prompt_lengths, start=1):
        num_blocks = (length + 4) // BLOCK_SIZE + 1
        prompt = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seq_id)).tolist()
        rows.append(new_row(seq_id, prompt, entries_of(*range(next_block, next_block + num_blocks))))
        next_block += num_blocks
    mirror.advance(mirror.apply(pb.StepRequest(new_rows=rows)))
    append_tokens(mirror, len(prompt_lengths))
    return mirror


def append_tokens(mirror: Mirror, num_rows: int) -> None:
    for seq_id in range(1, num_rows + 1):
        slot = mirror.slot_of(seq_id)
        mirror.append_token(slot, (int(mirror.num_tokens[slot]) * 7 + seq_id) % VOCAB_SIZE)


def decode_step(mirror: Mirror, *seq_ids: int) -> StepBatch:
    return build_batch(mirror, mirror.apply(pb.StepRequest(continued=continued(*seq_ids))))


class TestBuckets:
    def test_they_are_close_where_a_row_costs_most(self) -> None:
        assert decode_buckets(40) == (1, 2, 4, 8, 16, 24, 32, 40)
        buckets = decode_buckets(300)
        assert buckets[-6:] == (240, 248, 256, 272, 288, 300)

    @pytest.mark.parametrize(("max_num_seqs", "buckets"), [(1, (1,)), (3, (1, 2, 3)), (9, (1, 2, 4, 8, 9))])
    def test_the_largest_is_the_most_rows_there_may_be(self, max_num_seqs: int, buckets: tuple[int, ...]) -> None:
        assert decode_buckets(max_num_seqs) == buckets

    def test_many_rows_need_no_graph(self) -> None:
        assert decode_buckets(5000) == decode_buckets(512)
        assert decode_buckets(512)[-1] == 512

    @pytest.mark.parametrize(
        ("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16), (17, 24), (20, 24)]
    )
    def test_a_step_takes_the_smallest_that_holds_it(self, num_rows: int, bucket: int) -> None:
        assert bucket_for(decode_batch(num_rows, 4, LAYOUT), (1, 2, 4, 8, 16, 24)) == bucket

    def test_more_rows_than_the_largest_run_without(self) -> None:
        assert bucket_for(decode_batch(25, 4, LAYOUT), (1, 24)) is None
        assert bucket_for(decode_batch(1, 4, LAYOUT), ()) is None

    def test_a_prefill_chunk_in_it_runs_without(self) -> None:
        mirror = decoding(5, 9)
        chunk = new_row(3, range(4), entries_of(9))
        batch = build_batch(mirror, mirror.apply(pb.StepRequest(new_rows=[chunk], continued=continued(1, 2))))
        assert bucket_for(batch, (1, 2, 4, 8)) is None


class TestPadding:
    def test_rows_after_the_steps_own_write_nothing_and_see_nothing(self) -> None:
        batch = decode_step(decoding(5, 9, 20), 2, 1, 3)
        padded = pad_decode(batch, 5)
        for name in ("token_ids", "positions", "slot_mapping", "context_lens"):
            before, after = getattr(batch, name), getattr(padded, name)
            assert after.dtype == before.dtype
            assert np.array_equal(after[:3], before)
        assert padded.slot_mapping[3:].tolist() == [PADDING_SLOT] * 2
        assert padded.context_lens[3:].tolist() == [0, 0]
        assert padded.positions[3:].tolist() == [0, 0]
        assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5]
        assert padded.cu_seqlens_q.dtype == np.int32

    def test_what_belongs_to_rows_alone_stays(self) -> None:
        batch = decode_step(decoding(5, 9), 1, 2)
        padded = pad_decode(batch, 4)
        assert padded.block_table is batch.block_table
        assert padded.sampling_token_idxs is batch.sampling_token_idxs
        assert pad_decode(batch, 2).slot_mapping.tolist() == batch.slot_mapping.tolist()


class CountingRecorder(RerunRecorder):
    """Tells how many rows were recorded and replayed; may run out of memory."""

    def __init__(self, smallest: int = 0, error: Exception | None = None) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []
        self._smallest = smallest
        self._error = error or torch.OutOfMemoryError("no memory")

    def record(self, run: Callable[[], Tensor]) -> Recording:
        recording = super().record(run)
        num_rows = len(recording.output)
        if num_rows < self._smallest:
            raise self._error
        self.recorded.append(num_rows)

        def replay() -> None:
            self.replayed.append(num_rows)
            recording.replay()

        return replace(recording, replay=replay)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return save("llama-llama3-rope", tmp_path_factory.mktemp("model")).load()


def make_compute(decoder: Decoder, recorder: CountingRecorder | None, buckets: tuple[int, ...]) -> ModelCompute:
    """Return a compute whose graphs, if there is a recorder, run again what they recorded."""
    plan = ArenaPlan(decoder.config.num_layers, 8, decoder.layout(BLOCK_SIZE, slab_blocks=4))
    inputs = inputs_in_main_memory()
    compute = ModelCompute(decoder, PaddingBackend(), plan, plan.allocate(CPU), inputs)
    if recorder is not None:
        compute.record_graphs(DecodeGraphs(recorder, inputs, max(buckets), MAX_BLOCKS, CPU), buckets)
    return compute


def prefill(compute: ModelCompute, mirror: Mirror, num_rows: int) -> None:
    """Compute what the mirror believes to be computed."""
    slots = np.array([mirror.slot_of(seq_id) for seq_id in range(1, num_rows + 1)])
    num_scheduled = mirror.num_computed[slots].copy()
    mirror.num_computed[slots] = 0
    rows = mirror.apply(
        pb.StepRequest(
            continued=pb.ContinuedRows(seq_ids=range(1, num_rows + 1), num_scheduled_tokens=num_scheduled.tolist())
        )
    )
    compute.forward(build_batch(mirror, rows))
    mirror.advance(rows)


def test_padded_steps_give_the_logits_of_unpadded_ones(decoder: Decoder) -> None:
    """Rows come and go between steps, so that tables of earlier steps lie around."""
    recorder = CountingRecorder()
    graphs, eager = make_compute(decoder, recorder, (1, 4, 8)), make_compute(decoder, None, ())
    mirror = decoding(5, 20, 3, 17, 9)
    prefill(graphs, mirror, 5)
    prefill(eager, mirror, 5)
    assert recorder.recorded == [8, 4, 1]
    for seq_ids in ((1, 2, 3, 4, 5), (4, 2, 5), (3,), (1, 5)):
        batch = decode_step(mirror, *seq_ids)
        logits = graphs.forward(batch)
        assert logits.shape == (len(seq_ids), VOCAB_SIZE)
        torch.testing.assert_close(logits, eager.forward(batch), rtol=1e-5, atol=1e-5)
    assert recorder.replayed == [8, 4, 1, 4]


def test_graph_writes_what_later_steps_read(decoder: Decoder) -> None:
    recorder = CountingRecorder()
    graphs, eager = make_compute(decoder, recorder, (4,)), make_compute(decoder, None, ())
    mirror = decoding(7, 14)
    prefill(graphs, mirror, 2)
    prefill(eager, mirror, 2)
    for _ in range(4):
        batch = decode_step(mirror, 1, 2)
        torch.testing.assert_close(graphs.forward(batch), eager.forward(batch), rtol=1e-5, atol=1e-5)
        mirror.num_computed[[mirror.slot_of(1), mirror.slot_of(2)]] += 1
        append_tokens(mirror, 2)
    assert recorder.replayed == [4] * 4


def test_mixed_step_is_launched(decoder: Decoder) -> None:
    recorder = CountingRecorder()
    graphs, eager = make_compute(decoder, recorder, (4,)), make_compute(decoder, None, ())
    mirror = decoding(7)
    prefill(graphs, mirror, 1)
    prefill(eager, mirror, 1)
    chunk = new_row(2, range(30, 44), entries_of(10, 11), num_scheduled=9)
    batch = build_batch(mirror, mirror.apply(pb.StepRequest(new_rows=[chunk], continued=continued(1))))
    assert torch.equal(graphs.forward(batch), eager.forward(batch))
    assert recorder.replayed == []


def test_only_rows_that_sample_get_logits(decoder: Decoder) -> None:
    graphs = make_compute(decoder, CountingRecorder(), (4,))
    mirror = decoding(7, 9)
    prefill(graphs, mirror, 2)
    both = graphs.forward(decode_step(mirror, 1, 2))
    mirror.append_token(mirror.slot_of(1), 3)  # its newest token is another one now
    one = graphs.forward(decode_step(mirror, 1, 2))
    assert one.shape == (1, VOCAB_SIZE)
    assert torch.equal(one[0], both[1])


def test_recording_writes_nothing_to_the_arena(decoder: Decoder) -> None:
    plan = ArenaPlan(decoder.config.num_layers, 8, decoder.layout(BLOCK_SIZE, slab_blocks=4))
    arena, inputs = plan.allocate(CPU), inputs_in_main_memory()
    compute = ModelCompute(decoder, PaddingBackend(), plan, arena, inputs)
    compute.record_graphs(DecodeGraphs(RerunRecorder(), inputs, 4, MAX_BLOCKS, CPU), (1, 4))
    assert not arena.any()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nMore words."),
        torch.AcceleratorError("CUDA error: out of memory\nMore words."),  # the driver's own, for the graph itself
    ],
)
def test_buckets_for_which_memory_sufficed_stay(
    error: Exception, decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = CountingRecorder(smallest=4, error=error)
    with caplog.at_level(logging.INFO):
        graphs = make_compute(decoder, recorder, (1, 2, 4, 8))
    assert "recording graph 1 of 4: decode of 8 rows" in caplog.text
    assert "no graphs of 2 rows and fewer can be recorded: CUDA" in caplog.text
    assert "More words" not in caplog.text
    mirror = decoding(7)
    prefill(graphs, mirror, 1)
    graphs.forward(decode_step(mirror, 1))
    assert recorder.replayed == [4]


def test_progress_is_said_a_few_times_and_not_for_each(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecodeGraphs(RerunRecorder(), inputs_in_main_memory(), 256, 2, CPU)
    with caplog.at_level(logging.INFO):
        graphs.record_all(lambda inputs: torch.zeros(len(inputs.token_ids), 2), decode_buckets(256))
    assert graphs.buckets == decode_buckets(256)
    assert 4 <= len(caplog.records) <= 8
