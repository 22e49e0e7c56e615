"""pass@1 on HumanEval: the model completes a function greedily, and the problem's own tests are run on it."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quire.eval.errors import EvalMistakeError
from quire.eval.files import read_json_lines
from quire.eval.generation import generate
from quire.eval.loading import LoadedModel, TextCodec, check_length
from quire.eval.policies import NamedPolicy
from quire.eval.results import Part, digest
from quire.eval.sandbox import Outcome, Sandbox
from quire.eval.session import Session, progress_bar
from worker_svc.threads import usable_cores

_TASK = "humaneval"
_BATCH_ROWS = 32
_FIELDS = ("task_id", "prompt", "entry_point", "test")
# What begins after a function's body, from the paper's stop sequences (Chen et al. 2021, section 2.1) and later ones.
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\n@", "\nimport ", "\nfrom ", "\nassert ", "\n```")


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to be completed, and its tests."""

    task_id: str
    prompt: str
    entry_point: str
    test: str

    def program(self, completion: str) -> str:
        """Return the function and its tests as a program."""
        return f"{self.prompt}{completion}\n\n{self.test}\n\ncheck({self.entry_point})\n"


def read_problems(path: Path, flag: str) -> list[Problem]:
    """Return the problems of a .jsonl file. Raises EvalMistakeError that names the line at fault."""
    problems = []
    for where, value in read_json_lines(path, flag):
        for name in _FIELDS:
            if not isinstance(value.get(name), str):
                raise EvalMistakeError(f"{where}: no {name}, or it is no text")
        problems.append(Problem(*(value[name] for name in _FIELDS)))
    if not problems:
        raise EvalMistakeError(f"{flag}: {path} has no problems")
    return problems


def check_problems(model: LoadedModel, problems: Sequence[Problem], max_tokens: int) -> None:
    """Raise EvalMistakeError where a problem with its solution outgrows the model."""
    num_tokens = max(len(_prompt(problem, model.codec)) for problem in problems) + max_tokens
    check_length(model, num_tokens, "--humaneval with --humaneval-tokens")


def measure_humaneval(
    session: Session, problems: Sequence[Problem], max_tokens: int, sandbox: Sandbox
) -> dict[str, list[Outcome]]:
    """Return how each problem's solution ended under each policy, by its tiers."""
    prompts = [_prompt(problem, session.model.codec) for problem in problems]
    conditions = session.conditions(
        max_tokens=max_tokens, seconds=sandbox.cpu_seconds, memory_bytes=sandbox.memory_bytes
    )
    units = [f"{each.task_id} {digest([each.prompt, each.entry_point, each.test])}" for each in problems]
    due = [(policy, idx) for idx, unit in enumerate(units) for policy in session.missing(_TASK, unit, conditions)]
    with progress_bar("humaneval", len(due), "solutions") as bar:
        for begin in range(0, len(due), _BATCH_ROWS):
            batch = due[begin : begin + _BATCH_ROWS]
            completions = _complete(session, [(policy, prompts[idx]) for policy, idx in batch], max_tokens)
            programs = [problems[idx].program(text) for (_, idx), text in zip(batch, completions, strict=True)]
            with ThreadPoolExecutor(usable_cores()) as pool:
                outcomes = list(pool.map(sandbox.run, programs))
            session.results.put(
                {
                    Part(_TASK, policy.tiers, units[idx], conditions): {"outcome": outcome.value, "completion": text}
                    for (policy, idx), outcome, text in zip(batch, outcomes, completions, strict=True)
                }
            )
            bar.update(len(batch))
    return {
        policy.tiers: [
            Outcome(session.results.get(Part(_TASK, policy.tiers, unit, conditions))["outcome"]) for unit in units
        ]
        for policy in session.policies
    }


def cut_completion(text: str) -> str:
    """Return a completion up to where something other than the function's body begins."""
    return text[: min((place for stop in _STOPS if (place := text.find(stop)) >= 0), default=len(text))]


def _prompt(problem: Problem, codec: TextCodec) -> list[int]:
    return [*codec.prefix, *codec.encode(problem.prompt)]


def _complete(session: Session, prompts: Sequence[tuple[NamedPolicy, Sequence[int]]], max_tokens: int) -> list[str]:
    codec: TextCodec = session.model.codec
    eos_token_ids = frozenset(session.model.config.eos_token_ids)

    def ends(output: Sequence[int]) -> bool:
        text = codec.decode(output)
        return output[-1] in eos_token_ids or cut_completion(text) != text

    asked = [(policy.policy, prompt) for policy, prompt in prompts]
    generated = generate(session.make_rows(), asked, max_tokens, ends, lambda: None)
    return [cut_completion(codec.decode(output)) for output in generated.outputs]
