"""KV in several formats, served: blocks are narrowed by age, and under pressure before anybody gives way."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.cell import Cell
from tests.e2e.conftest import client_of

NUM_TOKENS = 100


def continue_all(cell: Cell, prompts: list[list[int]], **extensions: str) -> None:
    """Send the prompts at once; each gets all its output."""
    client = client_of(cell)
    model = client.models.list().data[0].id

    def send(prompt: list[int]) -> None:
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True, **extensions},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == NUM_TOKENS

    with client, ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(send, prompts))


def prompts_from(first_token_id: int) -> list[list[int]]:
    return [[first_token_id + 100 * idx + offset for offset in range(20)] for idx in range(8)]


@pytest.fixture(scope="module")
def scarce() -> Iterator[Cell]:
    """A cell in which about four of eight sequences find room, as long as their blocks are native."""
    with Cell(
        dtype="float32", kv_cache_memory="24MiB", kv_precision_policy="native", kv_precision_floor="int4"
    ) as cell:
        yield cell


def test_under_pressure_blocks_are_narrowed_and_nobody_is_preempted(scarce: Cell) -> None:
    before = scarce.stats()
    continue_all(scarce, prompts_from(1000))
    after = scarce.stats()
    assert after.num_preemptions_total == before.num_preemptions_total
    assert after.num_pressed_blocks_total > before.num_pressed_blocks_total
    assert after.num_demoted_blocks_total == 0


def test_requests_with_a_floor_keep_their_blocks_and_give_way_instead(scarce: Cell) -> None:
    before = scarce.stats()
    continue_all(scarce, prompts_from(5000), kv_precision_floor="native")
    after = scarce.stats()
    assert after.num_pressed_blocks_total == before.num_pressed_blocks_total
    assert after.num_preemptions_total > before.num_preemptions_total


def test_older_blocks_are_narrowed_and_found_again() -> None:
    with Cell(dtype="float32", kv_cache_memory="64MiB", kv_cache_dtype="k8v4") as cell, client_of(cell) as own:
        model = own.models.list().data[0].id
        prompt = "The capital of France is Paris. The capital of Italy is Rome. " * 12 + "The capital of France is"
        answers = [own.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0) for _ in range(2)]
        assert all(" Paris" in answer.choices[0].text for answer in answers)
        first, second = [answer.usage for answer in answers]
        assert first is not None
        assert second is not None
        assert second.prompt_tokens_details is not None
        # The newest full block was narrowed while the first answer was written; a new request wants it native.
        assert second.prompt_tokens_details.cached_tokens == (first.prompt_tokens // 16 - 1) * 16
        assert cell.stats().num_demoted_blocks_total > first.prompt_tokens // 16 - 3
