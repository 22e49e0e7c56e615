"""A GPU's compute built on a fake GPU: its arena is sized, its graphs recorded, and its steps are the model's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from protos import worker_pb2 as pb
from tests.worker.fake_gpu import CPU, GIB, FakeGpu, PaddingBackend, inputs_in_main_memory
from tests.worker.fakes import continued, new_row, tokens_of
from tests.worker.models.checkpoints import VOCAB_SIZE, Saved, save
from worker_svc.arena_plan import ArenaPlan
from worker_svc.engine import GpuBuilder, GpuParts, KVWish, StepLimits, gpu_buckets, make_sampler
from worker_svc.entries import EntryBounds
from worker_svc.errors import StartupError
from worker_svc.graphs import Recording, RerunRecorder, bucket_for
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.models.decoder import Decoder
from worker_svc.profiling import decode_batch, prefill_batch, prefill_slabs
from worker_svc.sampler import Choice, Sampler, SamplingRow
from worker_svc.staging import send_batch
from worker_svc.step import StepRunner
from worker_svc.torch_sampler import TorchSampler

LIMITS = StepLimits(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=32, block_size=8)
WISH = KVWish(None, 0.9)
BUCKETS = (1, 2, 4, 6)
STEP_BYTES, POOL_BYTES, GRAPH_BYTES = 5 * GIB, 2 * GIB, GIB // 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("llama-tied", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decoder(saved: Saved) -> Decoder:
    return saved.load()


@dataclass
class Machine:
    """A GPU on which steps and graphs take memory."""

    gpu: FakeGpu = field(default_factory=lambda: FakeGpu(foreign_bytes=GIB, tensor_bytes=16 * GIB))
    recorded: list[int] = field(default_factory=list)  # rows of each graph
    replayed: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # rows at once

    def parts(self, limits: StepLimits) -> GpuParts:
        return GpuParts(inputs_in_main_memory(limits.input_bytes), self.gpu, lambda: GraphRecorder(self))


class GraphRecorder(RerunRecorder):
    """Takes memory as CUDA graphs do: the first a pool, and each a little of its own."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._has_pool = False

    def record(self, run: Callable[[], Tensor]) -> Recording:
        recording = super().record(run)
        num_rows = len(recording.output)
        self._machine.recorded.append(num_rows)
        if not self._has_pool:
            self._machine.gpu.allocate(POOL_BYTES)
            self._has_pool = True
        self._machine.gpu.foreign_bytes += GRAPH_BYTES

        def replay() -> None:
            self._machine.replayed.append(num_rows)
            recording.replay()

        return Recording(recording.output, replay)


class HungrySampler:
    """The real sampler; logits and what it makes of them take memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sampler = TorchSampler(VOCAB_SIZE, CPU)

    def warm_up(self) -> None:
        self._sampler.warm_up()

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Choice]:
        self._machine.sampled.append(len(rows))
        self._machine.gpu.allocate(STEP_BYTES)
        self._machine.gpu.free(STEP_BYTES)
        return self._sampler.sample(logits, rows)


def make_builder(decoder: Decoder, machine: Machine, limits: StepLimits = LIMITS) -> GpuBuilder:
    return GpuBuilder(decoder, PaddingBackend(), limits, WISH, machine.parts(limits))


def make_runner(decoder: Decoder, machine: Machine) -> StepRunner:
    plan = ArenaPlan(decoder.config.num_layers, 8, decoder.layout(LIMITS.block_size, slab_blocks=4))
    compute = make_builder(decoder, machine).build(plan, BUCKETS)
    limits = MirrorLimits(6, LIMITS.max_model_len, LIMITS.block_size, VOCAB_SIZE, EntryBounds(8, plan.places_per_slab))
    return StepRunner(Mirror(limits), compute, TorchSampler(VOCAB_SIZE, CPU))


class TestMemory:
    def test_arena_is_what_weights_steps_and_graphs_leave(self, decoder: Decoder) -> None:
        machine = Machine()
        arena_bytes = make_builder(decoder, machine).arena_bytes(HungrySampler(machine), BUCKETS)
        layout = decoder.layout(LIMITS.block_size)
        # The measurement's arena is a real tensor of this process, of which the fake GPU knows nothing.
        uncounted_bytes = prefill_slabs(LIMITS.max_tokens, 6, LIMITS.max_model_len, layout) * layout.slab_bytes
        graph_bytes = POOL_BYTES + len(BUCKETS) * GRAPH_BYTES
        assert arena_bytes == 90 * GIB - GIB - (16 * GIB + STEP_BYTES - uncounted_bytes) - graph_bytes
        assert machine.sampled == [6, 6]  # the most rows, with the most tokens and with one each
        assert machine.recorded == [6, 4]

    def test_without_graphs_none_is_recorded(self, decoder: Decoder) -> None:
        machine = Machine()
        make_builder(decoder, machine).arena_bytes(TorchSampler(VOCAB_SIZE, CPU), ())
        assert machine.recorded == []

    def test_graph_for_which_memory_does_not_suffice_is_no_measurement(self, decoder: Decoder) -> None:
        class NoMemory(RerunRecorder):
            def record(self, run: Callable[[], Tensor]) -> Recording:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        parts = replace(Machine().parts(LIMITS), make_recorder=NoMemory)
        builder = GpuBuilder(decoder, PaddingBackend(), LIMITS, WISH, parts)
        with pytest.raises(StartupError, match=r"does not fit.*CUDA out of memory"):
            builder.arena_bytes(TorchSampler(VOCAB_SIZE, CPU), BUCKETS)

    @pytest.mark.parametrize("limits", [StepLimits(2, 64, 16, 8), StepLimits(1, 8192, 40, 16), StepLimits(8, 8, 40, 8)])
    def test_any_limits_can_be_measured(self, decoder: Decoder, limits: StepLimits) -> None:
        machine = Machine()
        make_builder(decoder, machine, limits).arena_bytes(HungrySampler(machine), ())
        assert machine.sampled == [limits.max_rows] * 2

    def test_step_that_does_not_fit_is_said_in_one_line(self, decoder: Decoder) -> None:
        class NoMemory(TorchSampler):
            def sample(self, logits: Tensor, rows: object) -> list[Choice]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore words.")

        builder = make_builder(decoder, Machine())
        with pytest.raises(StartupError, match=r"a step of 40 tokens and 6 rows does not fit.*20 GiB") as caught:
            builder.arena_bytes(NoMemory(VOCAB_SIZE, CPU), BUCKETS)
        assert "\n" not in str(caught.value)


class TestSteps:
    def test_rows_that_join_and_leave_decode_as_the_model_does(self, decoder: Decoder, saved: Saved) -> None:
        machine = Machine()
        runner = make_runner(decoder, machine)
        prompts = {1: list(range(3, 14)), 2: [70, 5, 5], 3: list(range(40, 57))}
        outputs: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}

        def step(request: pb.StepRequest) -> None:
            result = runner.run(request)
            assert result.status == pb.STEP_STATUS_OK, result.error
            for seq_id, token_id in tokens_of(result).items():
                outputs[seq_id].append(token_id)

        def row(seq_id: int, first_block: int) -> pb.NewRow:
            entries = [(block // 4 * 256 + block % 4) << 3 for block in range(first_block, first_block + 4)]
            return new_row(seq_id, prompts[seq_id], entries)

        step(pb.StepRequest(new_rows=[row(1, 0), row(2, 20)]))
        step(pb.StepRequest(continued=continued(1, 2)))
        step(pb.StepRequest(continued=continued(2, 1), new_rows=[row(3, 9)]))
        for _ in range(4):
            step(pb.StepRequest(continued=continued(3, 1, 2)))
        step(pb.StepRequest(continued=continued(3), finished_seq_ids=[1, 2]))
        # Steps with a prompt in them were launched; the others ran in the bucket that holds their rows.
        assert machine.recorded == [6, 4, 2, 1]
        assert machine.replayed == [2, 4, 4, 4, 4, 1]
        for seq_id, prompt in prompts.items():
            expected = saved.expected_logits([*prompt, *outputs[seq_id]])[len(prompt) - 1 : -1]
            assert outputs[seq_id] == expected.argmax(dim=1).tolist()

    def test_arena_that_cannot_be_had_is_said_in_one_line(
        self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def allocate(_plan: ArenaPlan, _device: torch.device) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore words.")

        monkeypatch.setattr(ArenaPlan, "allocate", allocate)
        with pytest.raises(StartupError, match=r"cannot be had in one piece.*CUDA out of memory.\)$"):
            make_runner(decoder, Machine())


class TestLimits:
    @pytest.mark.parametrize("limits", [LIMITS, StepLimits(2, 64, 16, 8), StepLimits(64, 16, 100, 16)])
    def test_inputs_hold_the_largest_step_and_no_more(self, decoder: Decoder, limits: StepLimits) -> None:
        layout, rows, width = decoder.layout(limits.block_size), limits.max_rows, limits.max_blocks
        largest = prefill_batch(limits.max_tokens, rows, limits.max_model_len, width, layout)
        inputs = inputs_in_main_memory(limits.input_bytes)
        for batch in (largest, decode_batch(rows, width, layout)):
            assert torch.equal(send_batch(inputs, batch).block_table, torch.from_numpy(batch.block_table))
        with pytest.raises(AssertionError):
            send_batch(inputs_in_main_memory(limits.input_bytes - 1), largest)

    def test_tokens_are_never_more_than_rows_can_have(self) -> None:
        assert StepLimits(2, 8192, 2048, 16).max_tokens == 4096
        assert StepLimits(8, 8192, 2048, 16).max_tokens == 8192

    def test_rows_are_never_more_than_tokens(self) -> None:
        assert StepLimits(64, 16, 100, 16).max_rows == 16
        assert gpu_buckets(StepLimits(64, 16, 100, 16), enforce_eager=False) == (1, 2, 4, 8, 16)

    def test_enforcing_eager_leaves_no_graphs(self) -> None:
        assert gpu_buckets(LIMITS, enforce_eager=True) == ()

    def test_logits_are_sampled_where_they_are(self) -> None:
        assert isinstance(make_sampler(8, CPU), Sampler)
        assert isinstance(make_sampler(8, torch.device("cuda:0")), TorchSampler)


class TestLargestSteps:
    @pytest.mark.parametrize(
        ("num_tokens", "lengths"), [(40, [32, 6, 1, 1]), (128, [32] * 4), (4, [1] * 4), (5, [2, 1, 1, 1])]
    )
    def test_prefill_has_long_rows_before_single_tokens(
        self, num_tokens: int, lengths: list[int], decoder: Decoder
    ) -> None:
        layout = decoder.layout(8)
        batch = prefill_batch(num_tokens, 4, 32, 5, layout)
        assert batch.block_table.shape == (4, 5)
        assert batch.context_lens.tolist() == lengths
        assert batch.cu_seqlens_q.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
        assert batch.positions.max() < 32
        assert batch.max_query_len == lengths[0]
        assert len(set(batch.slot_mapping.tolist())) == num_tokens
        assert batch.sampling_token_idxs.tolist() == (batch.cu_seqlens_q[1:] - 1).tolist()
        blocks = batch.slot_mapping // 8
        assert (blocks // 256 < prefill_slabs(num_tokens, 4, 32, layout)).all()
        for row, length in enumerate(lengths):
            begin = batch.cu_seqlens_q[row]
            own = batch.block_table[row, : -(-length // 8)] >> 3
            assert blocks[begin : begin + length].tolist() == [int(own[position // 8]) for position in range(length)]

    def test_decode_has_the_widest_tables(self, decoder: Decoder) -> None:
        batch = decode_batch(11, 5, decoder.layout(8))
        assert batch.block_table.shape == (11, 5)
        assert (batch.slot_mapping // 8).tolist() == (batch.block_table[:, 0] >> 3).tolist()
        assert len(set(batch.slot_mapping.tolist())) == 11
        assert bucket_for(batch, (16,)) == 16
