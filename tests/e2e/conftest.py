"""A real cell, started once by the `quire serve` command, and what `transformers` says to a few prompts."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from bench.cell import Cell
from bench.exact_text import Exchange, reference_exchanges

PROMPT_LENGTHS = (10, 47, 128, 300, 530)
OUTPUT_TOKENS = 40


def client_of(cell: Cell) -> OpenAI:
    return OpenAI(base_url=f"{cell.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def cell() -> Iterator[Cell]:
    with Cell(dtype="float32", kv_cache_memory="256MiB") as cell:
        yield cell


@pytest.fixture(scope="session")
def client(cell: Cell) -> Iterator[OpenAI]:
    with client_of(cell) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def exchanges() -> list[Exchange]:
    return reference_exchanges("bundled", PROMPT_LENGTHS, OUTPUT_TOKENS)
