"""Several answers to one prompt, over real processes: samples that share it, and beam search."""

import threading

import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer
from transformers import GenerationConfig

from bench.cell import Cell, model_folder
from bench.exact_text import prompts_of
from bench.padded import load_reference

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{model_folder('bundled')}/tokenizer.json")


@pytest.mark.parametrize("extra", [{}, {"use_beam_search": True}], ids=["samples", "beams"])
def test_eight_answers_hold_a_long_prompt_once(
    cell: Cell, client: OpenAI, model: str, tokenizer: Tokenizer, extra: dict[str, bool]
) -> None:
    (prompt,) = prompts_of(tokenizer, [1000])
    n, max_tokens = 8, 20

    def ask() -> None:
        client.completions.create(
            model=model, prompt=prompt, n=n, max_tokens=max_tokens, extra_body={"ignore_eos": True} | extra
        )

    asking = threading.Thread(target=ask)
    asking.start()
    seen = []
    while asking.is_alive():
        (lane,) = cell.stats().lanes
        if lane.num_running_seqs == n:
            seen.append(sum(lane.num_referenced_blocks))
    asking.join()
    num_shared = len(prompt) // BLOCK_SIZE
    num_tails = n * (-(-(len(prompt) + max_tokens) // BLOCK_SIZE) - num_shared)
    assert num_shared < max(seen) <= 1.1 * (num_shared + num_tails)


def test_beam_search_finds_what_transformers_finds(client: OpenAI, model: str, tokenizer: Tokenizer) -> None:
    (prompt,) = prompts_of(tokenizer, [47])
    width, max_tokens = 4, 16
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.inference_mode():
        expected = load_reference("bundled", "float32").generate(torch.tensor([prompt]), generation_config=config)
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        n=width,
        max_tokens=max_tokens,
        extra_body={"use_beam_search": True, "ignore_eos": True},
    )
    texts = [tokenizer.decode(token_ids) for token_ids in expected[:, len(prompt) :].tolist()]
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == width * max_tokens
