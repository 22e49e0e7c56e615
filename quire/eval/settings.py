"""The flags of `quire eval`. Those that `quire serve` has too mean the same, and are read from the same variables."""

import re
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protos.settings import ServiceSettings
from worker_svc.settings import BlockSize, Device

TASKS = ("text", "choices", "generation", "humaneval")
_DEFAULT_TASKS = "text choices generation"


class EvalSettings(ServiceSettings):
    """The model, the policies, what is measured of them, and where it is written."""

    model_config = SettingsConfigDict(cli_prog_name="quire eval", cli_shortcuts={"json-file": "json"})

    model: str = Field(
        "bundled",
        description='Hugging Face folder, GGUF file, Hub id, or "bundled" for the small model that comes along',
    )
    policies: str = Field(
        "int8 fp8 k8v4 int4 mixed",
        description="what is compared with native, blanks between: names of KV cache dtypes, policies such as "
        "native:16,int8:48,int4, or curve, which stands for all names and for policies by age between them",
    )
    tasks: str = Field(
        _DEFAULT_TASKS,
        description="what is measured, blanks or commas between: text, choices, generation; humaneval is added where "
        "--humaneval names its file",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "float32", description="dtype of compute and of native KV while measuring; auto: bfloat16"
    )
    serve_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of native KV in which bytes are reckoned; auto: bfloat16, as quire serve has it"
    )
    device: Device = Field(
        "auto", description="where to compute: auto, cpu, cuda or cuda:N; auto: the first GPU, if any"
    )
    num_threads: int | None = Field(
        None, ge=1, description="threads that compute on a CPU; none: one for each core this process may use"
    )
    block_size: BlockSize = Field(16, description="tokens of a KV block: 8, 16 or 32")
    kv_cache_memory: ByteSize = Field(
        ByteSize(1 << 30), description="bytes of the KV arena whose blocks are counted, such as 512MiB or 4GiB"
    )

    text: Path | None = Field(None, description="text file for perplexity and KL; none: the one that comes along")
    text_tokens: int | None = Field(None, ge=2, description="tokens of the text that are read; none: all")
    window_tokens: int = Field(2048, ge=16, description="tokens of a window; each window is scored apart")

    items: Path | None = Field(
        None, description="multiple-choice items, MMLU's .csv or .jsonl; none: the 50 that come along"
    )
    examples: Path | None = Field(
        None, description="solved items that come before each question, as --items; none: those that come along"
    )
    num_examples: int | None = Field(None, ge=0, description="how many of these are used; none: all")
    answers: Literal["text", "letter"] = Field(
        "text", description="what of an answer is scored: its text, by log probability a character, or its letter"
    )

    num_prompts: int = Field(8, ge=1, description="prompts, pieces of the text, that are continued greedily")
    prompt_tokens: int = Field(512, ge=1, description="tokens of such a prompt")
    output_tokens: int = Field(64, ge=2, description="tokens of its continuation")

    humaneval: Path | None = Field(
        None, description="problems in HumanEval's .jsonl; the code that the model writes is run, in a sandbox"
    )
    humaneval_tokens: int = Field(384, ge=1, description="most tokens of a solution")
    code_seconds: int = Field(10, ge=1, description="seconds that a solution may run")
    code_memory: ByteSize = Field(ByteSize(1 << 30), description="bytes that a solution may take, such as 512MiB")

    json_file: Path | None = Field(
        None,
        description="file for all figures; parts that it holds already are not measured again; none: no file",
    )
    plot: Path | None = Field(None, description="PNG file for a plot of KL over bytes; none: no plot")

    @property
    def task_names(self) -> list[str]:
        """What is measured, in the order of `TASKS`."""
        wanted = {*re.findall(r"[^\s,]+", self.tasks), *(["humaneval"] if self.humaneval else [])}
        return [task for task in TASKS if task in wanted]

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, value: str) -> str:
        for task in re.findall(r"[^\s,]+", value):
            if task not in TASKS:
                raise ValueError(f"{task} is none of {', '.join(TASKS)}")
        return value

    @field_validator("kv_cache_memory", "code_memory")
    @classmethod
    def _check_bytes(cls, value: ByteSize) -> ByteSize:
        if value <= 0:
            raise ValueError("not more than 0 bytes")
        return value

    @model_validator(mode="after")
    def _check_humaneval(self) -> "EvalSettings":
        if "humaneval" in self.tasks and self.humaneval is None:
            raise ValueError("the task humaneval needs --humaneval, the file with its problems")
        return self
