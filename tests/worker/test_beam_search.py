"""Beam search by the scheduler's core and a worker's steps, against `transformers`, in float32.

Where no beam ends early, both search alike and find the same. With stop tokens they differ by design: `transformers`
completes a beam only if it is among the best k candidates of its step and divides by the number of output tokens; here,
as in vLLM, each beam's stop token among its best 2 k completes it, and the prompt's tokens count as well. So these
searches are checked against a plain one over the logits of `transformers`.
"""

from collections.abc import Sequence

import pytest
import torch
from transformers import GenerationConfig

from kernels.dispatch import backend_for
from protos import common_pb2, scheduler_pb2
from scheduler_svc import convert
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import SchedulerConfig
from scheduler_svc.core.types import FinishReason, LaneId, LaneSpec, TokenRun
from scheduler_svc.index.memory import MemoryIndex
from tests.scheduler.core.fake_model import Top, plain_beam_search
from tests.worker.models.checkpoints import CPU, VOCAB_SIZE, Saved, save
from worker_svc.arena_plan import ArenaPlan
from worker_svc.compute import ModelCompute
from worker_svc.entries import EntryBounds
from worker_svc.mirror import Mirror, MirrorLimits
from worker_svc.sampler import Sampler
from worker_svc.step import StepRunner

LANE = LaneId("w0")
BLOCK_SIZE = 8
SPEC = LaneSpec(64, 4, BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64)
PROMPTS = [[5, 9, 2, 44, 3], list(range(20, 43))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("llama-tied", tmp_path_factory.mktemp("model"))


@pytest.fixture
def runner(saved: Saved) -> StepRunner:
    decoder, backend = saved.load(), backend_for(CPU)
    plan = ArenaPlan(decoder.config.num_layers, SPEC.num_slabs, decoder.layout(BLOCK_SIZE, SPEC.blocks_per_slab))
    backend.warm_up(plan.layout, decoder.config.num_heads, decoder.attention_params)
    bounds = EntryBounds(SPEC.num_slabs, plan.places_per_slab)
    mirror = Mirror(MirrorLimits(SPEC.max_num_seqs, SPEC.max_model_len, BLOCK_SIZE, VOCAB_SIZE, bounds))
    return StepRunner(mirror, ModelCompute(decoder, backend, plan, plan.allocate(CPU)), Sampler(VOCAB_SIZE))


def make_submit(
    prompt: Sequence[int], n: int, max_tokens: int, length_penalty: float = 1.0, stops: Sequence[int] = ()
) -> scheduler_pb2.Submit:
    return scheduler_pb2.Submit(
        request_id=str(prompt),
        token_ids=prompt,
        n=n,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, num_logprobs=0),
        beam_search=scheduler_pb2.BeamSearch(length_penalty=length_penalty),
    )


def search(runner: StepRunner, *submits: scheduler_pb2.Submit) -> dict[str, list[TokenRun]]:
    """Run requests to their ends over the wire's messages; return the answers of each, by request id."""
    scheduler = Scheduler(SchedulerConfig(), MemoryIndex())
    scheduler.add_lane(LANE, SPEC)
    for submit in submits:
        scheduler.submit(convert.request_from_wire(submit, common_pb2.ModelInfo(fingerprint=b"m"), b"", now_ms=0))
    answers: dict[str, list[TokenRun]] = {submit.request_id: [] for submit in submits}
    while (planned := scheduler.plan(LANE, 0)[0]) is not None:
        result = runner.run(convert.step_to_wire(planned, lane_epoch=1))
        for run in scheduler.apply(LANE, convert.step_result_from_wire(result)):
            assert run.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), run
            answers[run.request_id].append(run)
        scheduler.check_integrity()
    return answers


def logprob_of(run: TokenRun) -> float:
    return sum(convert.logprobs_to_wire(entry).logprob for entry in run.logprobs)


@pytest.mark.parametrize(("width", "length_penalty"), [(2, 0.0), (4, 2.0), (6, 1.0)])
def test_sequences_are_those_of_transformers(
    saved: Saved, runner: StepRunner, width: int, length_penalty: float
) -> None:
    max_tokens = 12
    answers = search(runner, *(make_submit(prompt, width, max_tokens, length_penalty) for prompt in PROMPTS))
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        length_penalty=length_penalty,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    for prompt in PROMPTS:
        with torch.inference_mode():
            expected = saved.model.generate(torch.tensor([prompt]), generation_config=config)  # type: ignore[operator]
        runs = answers[str(prompt)]
        assert [list(run.token_ids) for run in runs] == expected.sequences[:, len(prompt) :].tolist()
        logprobs = expected.sequences_scores * max_tokens**length_penalty
        assert [logprob_of(run) for run in runs] == pytest.approx(logprobs.tolist(), abs=1e-3)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -3.0])
def test_answers_that_end_early_are_those_of_a_plain_search_over_its_logits(
    saved: Saved, runner: StepRunner, length_penalty: float
) -> None:
    width, max_tokens, stops = 3, 12, range(0, VOCAB_SIZE, 8)

    def top_after(token_ids: list[int]) -> Top:
        logprobs = torch.log_softmax(saved.expected_logits(token_ids)[-1].double(), dim=0)
        best = logprobs.topk(2 * width)
        return Top(best.indices.tolist(), best.values.tolist())

    answers = search(runner, *(make_submit(prompt, width, max_tokens, length_penalty, stops) for prompt in PROMPTS))
    num_stopped = 0
    for prompt in PROMPTS:
        expected = plain_beam_search(prompt, top_after, width, length_penalty, max_tokens, frozenset(stops))
        runs = answers[str(prompt)]
        assert [list(run.token_ids) for run in runs] == [output for output, _ in expected]
        assert [logprob_of(run) for run in runs] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)
        num_stopped += sum(run.finish_reason is FinishReason.STOP for run in runs)
    assert num_stopped
