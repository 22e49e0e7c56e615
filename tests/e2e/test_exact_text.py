"""Greedy in float32: the very text that `transformers` gives, whatever happens around a sequence."""

from concurrent.futures import ThreadPoolExecutor

import psutil
from openai import OpenAI

from bench.cell import Cell
from bench.exact_text import Exchange, num_differing


async def test_each_alone(cell: Cell, exchanges: list[Exchange]) -> None:
    assert await num_differing(cell, exchanges, "alone", at_once=1) == 0


async def test_all_together_then_with_the_prefix_cache_warm(cell: Cell, exchanges: list[Exchange]) -> None:
    hits_before = cell.stats().prefix_cache_hits_total
    assert await num_differing(cell, exchanges, "together", at_once=len(exchanges)) == 0
    hits_cold = cell.stats().prefix_cache_hits_total
    assert hits_cold == hits_before
    assert await num_differing(cell, exchanges, "together", at_once=len(exchanges)) == 0
    full_blocks_tokens = sum((len(exchange.prompt) - 1) // 16 * 16 for exchange in exchanges)
    assert cell.stats().prefix_cache_hits_total - hits_cold == full_blocks_tokens


async def test_preempted_sequences(exchanges: list[Exchange]) -> None:
    """Eight sequences start in a pool that can hold about four of them to their end."""
    short = [exchange for exchange in exchanges if len(exchange.prompt) < 64]
    with Cell(dtype="float32", kv_cache_memory="16MiB", enable_prefix_caching=False) as scarce:
        assert await num_differing(scarce, short * 4, "", at_once=8) == 0
        assert scarce.stats().num_preemptions_total > 0


def test_worker_killed_in_the_middle_of_a_stream(
    cell: Cell, client: OpenAI, model: str, exchanges: list[Exchange]
) -> None:
    def read(position: int) -> str:
        exchange = exchanges[position]
        stream = client.completions.create(
            model=model,
            prompt=exchange.prompt,
            max_tokens=len(exchange.expected_token_ids),
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "cache_salt": "killed"},
        )
        texts = []
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            if position == 0 and len(texts) == 5:
                psutil.Process(cell.service_pid("worker_svc")).kill()
        return "".join(texts)

    losses_before = cell.stats().num_worker_losses_total
    with ThreadPoolExecutor() as pool:
        texts = list(pool.map(read, range(len(exchanges))))
    assert texts == [exchange.expected_text for exchange in exchanges]
    assert cell.stats().num_worker_losses_total == losses_before + 1
    assert "the worker died (killed by SIGKILL); starting it again" in cell.log
