"""Exact text: greedy, float32 compute and KV, token for token what `transformers` gives.

20 prompts of 10 to 1,500 tokens, 64 output tokens each: one at a time, all together, with the prefix cache warm, and in
a cell with so little KV memory that sequences are preempted.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tokenizers import Tokenizer

from bench.cell import ROOT, Cell, model_folder
from bench.client import find_model
from bench.compare import CompareSettings, run_comparison
from bench.padded import generate_padded, load_reference
from bench.report import Finding, at_least, never, say

PROMPT_TOKENS = (10, 16, 17, 31, 48, 64, 90, 128, 150, 200, 256, 300, 384, 450, 512, 700, 900, 1024, 1300, 1500)
OUTPUT_TOKENS = 64
REFERENCE_BATCH = 5
# Of float32 KV: the longest prompt and its output fit, a handful of the others beside it.
SCARCE_KV_MEMORY = "112MiB"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and the text that the reference continues it with."""

    prompt: list[int]
    expected_token_ids: list[int]
    expected_text: str  # special tokens included


def prompts_of(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Return prompts of the given token counts, each from another place of this project's licence."""
    token_ids = tokenizer.encode((ROOT / "LICENSE").read_text()).ids
    starts = [position * (len(token_ids) - max(lengths)) // len(lengths) for position in range(len(lengths))]
    return [token_ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def reference_exchanges(model: str, prompt_lengths: Sequence[int], num_output_tokens: int) -> list[Exchange]:
    """Return what `transformers` gives, greedy and in float32; prompts of like lengths go as one batch."""
    tokenizer = Tokenizer.from_file(f"{model_folder(model)}/tokenizer.json")
    reference = load_reference(model, "float32")
    prompts = prompts_of(tokenizer, prompt_lengths)
    exchanges = []
    for start in range(0, len(prompts), REFERENCE_BATCH):
        batch = prompts[start : start + REFERENCE_BATCH]
        for prompt, token_ids in zip(batch, generate_padded(reference, batch, num_output_tokens), strict=True):
            exchanges.append(Exchange(prompt, token_ids, tokenizer.decode(token_ids, skip_special_tokens=False)))
    return exchanges


def completion_body(model: str, exchange: Exchange, cache_salt: str) -> dict[str, Any]:
    """Return the greedy completion request whose answer should be the exchange's text."""
    return {
        "model": model,
        "prompt": exchange.prompt,
        "max_tokens": len(exchange.expected_token_ids),
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "cache_salt": cache_salt,
    }


async def num_differing(cell: Cell, exchanges: Sequence[Exchange], cache_salt: str, at_once: int) -> int:
    """Send the exchanges, `at_once` at a time; return how many answers differ from what is expected."""
    model = await find_model(cell.url)
    gate = asyncio.Semaphore(at_once)

    async def differs(client: httpx.AsyncClient, exchange: Exchange) -> bool:
        async with gate:
            response = await client.post("/v1/completions", json=completion_body(model, exchange, cache_salt))
            response.raise_for_status()
            answer = response.json()
            text, num_tokens = answer["choices"][0]["text"], answer["usage"]["completion_tokens"]
            return bool((text, num_tokens) != (exchange.expected_text, len(exchange.expected_token_ids)))

    async with httpx.AsyncClient(base_url=cell.url, timeout=None) as client:
        return sum(await asyncio.gather(*(differs(client, exchange) for exchange in exchanges)))


async def measure(settings: CompareSettings, repeats: int) -> list[Finding]:
    """Compare; `repeats` and `dtype` change nothing: the promise is for float32."""
    exchanges = await asyncio.to_thread(reference_exchanges, settings.model, PROMPT_TOKENS, OUTPUT_TOKENS)
    say(f"{len(exchanges)} prompts of {min(PROMPT_TOKENS)} to {max(PROMPT_TOKENS)} tokens")
    findings = []
    with Cell(model=settings.model, dtype="float32") as cell:
        for name, salt, at_once in (
            ("alone", "alone", 1),
            ("all together", "together", len(exchanges)),
            ("all together, prefix cache warm", "together", len(exchanges)),
        ):
            differing = await num_differing(cell, exchanges, salt, at_once)
            findings.append(never(f"texts that differ from transformers', {name}", [differing], "texts"))
    with Cell(model=settings.model, dtype="float32", kv_cache_memory=SCARCE_KV_MEMORY) as cell:
        differing = await num_differing(cell, exchanges, "scarce", len(exchanges))
        findings.append(never("texts that differ from transformers', with preemption", [differing], "texts"))
        findings.append(at_least("preemptions in that run", [cell.stats().num_preemptions_total], 1, "preemptions"))
    return findings


if __name__ == "__main__":
    run_comparison(measure, default_repeats=1)
