"""`transformers` as the reference: static batches, padded on the left, generated until the longest output is done."""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.cell import model_folder
from bench.workload import Job

PAD_TOKEN_ID = 0


class PaddedGenerator:
    """`transformers.generate` on padded batches, greedy, with every core of this process."""

    def __init__(self, model: str, dtype: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = load_reference(model, dtype)

    def tokens_per_s(self, jobs: Sequence[Job], batch_size: int) -> float:
        """Return the output tokens that the jobs asked for over the seconds that all their batches took."""
        begin_s = time.perf_counter()
        for start in range(0, len(jobs), batch_size):
            self._generate(jobs[start : start + batch_size])
        return sum(job.num_output_tokens for job in jobs) / (time.perf_counter() - begin_s)

    def _generate(self, batch: Sequence[Job]) -> None:
        prompts = [job.prompt for job in batch if not isinstance(job.prompt, str)]
        assert len(prompts) == len(batch), "prompts must be token ids"
        generate_padded(self._model, prompts, max(job.num_output_tokens for job in batch))


def load_reference(model: str, dtype: str) -> Any:
    """Return the model as `transformers` runs it; no token ends an output."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=getattr(torch, dtype))
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = PAD_TOKEN_ID
    return reference


def generate_padded(model: Any, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
    """Return `num_new_tokens` greedy tokens after each prompt, the prompts being one batch padded on the left."""
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), PAD_TOKEN_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        output = model.generate(
            input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=num_new_tokens, do_sample=False
        )
    assert output.shape[1] == width + num_new_tokens, f"{output.shape[1] - width} tokens came, not {num_new_tokens}"
    new_tokens: list[list[int]] = output[:, width:].tolist()
    return new_tokens
