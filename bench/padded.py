"""Static batching with `transformers`: pad a batch on the left, generate until its longest output is done."""

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
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=getattr(torch, dtype))
        # Outputs have the lengths that the jobs name: no token ends them.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = PAD_TOKEN_ID

    def tokens_per_s(self, jobs: Sequence[Job], batch_size: int) -> float:
        """Return the output tokens that the jobs asked for over the seconds that all their batches took."""
        begin_s = time.perf_counter()
        for start in range(0, len(jobs), batch_size):
            self._generate(jobs[start : start + batch_size])
        return sum(job.num_output_tokens for job in jobs) / (time.perf_counter() - begin_s)

    def _generate(self, batch: Sequence[Job]) -> None:
        width = max(job.num_prompt_tokens for job in batch)
        input_ids = torch.full((len(batch), width), PAD_TOKEN_ID)
        attention_mask = torch.zeros_like(input_ids)
        for row, job in enumerate(batch):
            assert not isinstance(job.prompt, str), "prompts must be token ids"
            input_ids[row, width - job.num_prompt_tokens :] = torch.tensor(job.prompt)
            attention_mask[row, width - job.num_prompt_tokens :] = 1
        num_new = max(job.num_output_tokens for job in batch)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=num_new, do_sample=False
            )
        assert output.shape[1] == width + num_new, f"{output.shape[1] - width} tokens came, not {num_new}"
