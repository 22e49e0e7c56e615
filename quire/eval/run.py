"""A whole run: what flags name is read, the tasks are done one after another, and their figures are put together."""

from dataclasses import dataclass, replace

from quire.eval.choices import check_questions, measure_choices
from quire.eval.files import DATA_FOLDER, read_text
from quire.eval.generation import (
    Generated,
    Overlap,
    cut_prompts,
    measure_generation,
    missing_overlap_packages,
    overlap,
)
from quire.eval.humaneval import Problem, check_problems, measure_humaneval, read_problems
from quire.eval.items import Item, read_items
from quire.eval.loading import TextCodec, check_length, load_model, use_threads
from quire.eval.policies import NATIVE, NamedPolicy
from quire.eval.results import Results
from quire.eval.sandbox import Outcome, Sandbox
from quire.eval.session import Session
from quire.eval.settings import EvalSettings
from quire.eval.sizes import LENGTHS_TOKENS, KVShape, native_ratio, pool_blocks, sequence_bytes
from quire.eval.summary import PolicySummary
from quire.eval.text import TextScore, check_text, measure_text
from worker_svc.loader.resolve import Progress

_SHIPPED_TEXT = DATA_FOLDER / "text.txt"
_SHIPPED_ITEMS = DATA_FOLDER / "items.jsonl"
_SHIPPED_EXAMPLES = DATA_FOLDER / "examples.jsonl"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the files hold; empty where no task asks for it."""

    text: str
    items: list[Item]
    examples: list[Item]
    problems: list[Problem]

    @classmethod
    def read(cls, settings: EvalSettings) -> "Inputs":
        """Read what the tasks need. Raises EvalMistakeError."""
        tasks = settings.task_names
        needs_items = "choices" in tasks
        examples = read_items(settings.examples or _SHIPPED_EXAMPLES, "--examples") if needs_items else []
        return cls(
            text=read_text(settings.text or _SHIPPED_TEXT, "--text") if {"text", "generation"} & {*tasks} else "",
            items=read_items(settings.items or _SHIPPED_ITEMS, "--items") if needs_items else [],
            examples=examples[: settings.num_examples],
            problems=read_problems(settings.humaneval, "--humaneval") if settings.humaneval else [],
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """What the tasks found, by the policies' tiers; empty for a task that was not asked for."""

    text: dict[str, TextScore]
    choices: dict[str, list[int]]
    generation: dict[str, Generated]
    humaneval: dict[str, list[Outcome]]


def evaluate(settings: EvalSettings, policies: list[NamedPolicy], progress: Progress) -> list[PolicySummary]:
    """Measure what is not in the JSON file yet; return a summary of each policy, native first.

    Raises EvalMistakeError for a flag or file that is wrong, ModelError, StartupError or KernelError for a model that
    cannot be had or computed, OSError for a file that cannot be written.
    """
    inputs = Inputs.read(settings)
    results = Results(settings.json_file)
    sandbox = Sandbox.open(settings.code_seconds, settings.code_memory) if inputs.problems else None
    use_threads(settings.num_threads)
    model = load_model(settings.model, settings.dtype, settings.device, progress)
    session = Session(model, settings.block_size, policies, results)
    shape = KVShape.of(model.config, settings.block_size, settings.serve_dtype)
    sizes = {policy.tiers: pool_blocks(shape, policy.policy, settings.kv_cache_memory) for policy in policies}
    figures = _run_tasks(session, settings, inputs, sandbox)
    summaries = [_summarize(policy, shape, sizes[policy.tiers], figures, inputs, model.codec) for policy in policies]
    results.write(
        model=model.name,
        model_fingerprint=model.fingerprint,
        kv_cache_memory_bytes=settings.kv_cache_memory,
        native_dtype_of_bytes=shape.native_dtype,
        summary=[summary.to_json() for summary in summaries],
    )
    if results.num_reused:
        progress(f"{results.num_reused} parts were in {settings.json_file} already")
    return summaries


def _run_tasks(session: Session, settings: EvalSettings, inputs: Inputs, sandbox: Sandbox | None) -> Figures:
    tasks = settings.task_names
    model, prefix = session.model, session.model.codec.prefix
    token_ids = model.codec.encode(inputs.text)[: settings.text_tokens]
    prompts: list[list[int]] = []
    figures = Figures({}, {}, {}, {})
    # A mistake is found before hours of measuring.
    if "text" in tasks:
        check_length(model, settings.window_tokens + len(prefix), "--window-tokens")
        check_text(token_ids, "--text")
    if "choices" in tasks:
        check_questions(model, inputs.items, inputs.examples, settings.answers)
    if "generation" in tasks:
        pieces = cut_prompts(token_ids, settings.num_prompts, settings.prompt_tokens)
        prompts = [[*prefix, *piece] for piece in pieces]
        check_length(model, len(prompts[0]) + settings.output_tokens, "--prompt-tokens and --output-tokens")
    if sandbox is not None:
        check_problems(model, inputs.problems, settings.humaneval_tokens)
    if "text" in tasks:
        figures.text.update(measure_text(session, token_ids, settings.window_tokens))
    if "choices" in tasks:
        figures.choices.update(measure_choices(session, inputs.items, inputs.examples, settings.answers))
    if "generation" in tasks:
        figures.generation.update(measure_generation(session, prompts, settings.output_tokens))
    if sandbox is not None:
        figures.humaneval.update(measure_humaneval(session, inputs.problems, settings.humaneval_tokens, sandbox))
    return figures


def _summarize(
    policy: NamedPolicy, shape: KVShape, num_pool_blocks: int, figures: Figures, inputs: Inputs, codec: TextCodec
) -> PolicySummary:
    summary = PolicySummary(
        name=policy.name,
        tiers=policy.tiers,
        is_uniform=policy.is_uniform,
        sequence_bytes={length: sequence_bytes(shape, policy.policy, length) for length in LENGTHS_TOKENS},
        native_ratios={length: native_ratio(shape, policy.policy, length) for length in LENGTHS_TOKENS},
        pool_blocks=num_pool_blocks,
    )
    if text := figures.text.get(policy.tiers):
        summary = replace(
            summary,
            num_tokens=text.num_tokens,
            perplexity=text.perplexity,
            perplexity_change=text.perplexity / figures.text[NATIVE].perplexity - 1,
            kl=text.kl,
            agreement=text.agreement,
        )
    if picks := figures.choices.get(policy.tiers):
        num_right = sum(pick == item.answer_idx for pick, item in zip(picks, inputs.items, strict=True))
        summary = replace(summary, num_items=len(picks), num_right=num_right)
    if generated := figures.generation.get(policy.tiers):
        alike = _overlap(generated, figures.generation[NATIVE], codec)
        summary = replace(
            summary,
            bleu=alike.bleu if alike else None,
            rouge_l=alike.rouge_l if alike else None,
            first_token_ms=generated.first_token_ms,
            tokens_per_second=generated.tokens_per_second,
        )
    if outcomes := figures.humaneval.get(policy.tiers):
        summary = replace(summary, num_problems=len(outcomes), num_passed=outcomes.count(Outcome.PASSED))
    return summary


def _overlap(generated: Generated, native: Generated, codec: TextCodec) -> Overlap | None:
    if missing_overlap_packages():
        return None
    texts, native_texts = ([codec.decode(output) for output in each.outputs] for each in (generated, native))
    return overlap(texts, native_texts)
