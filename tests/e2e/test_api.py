"""What people do with the official client, through gateway, scheduler and worker, with a real model."""

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from bench.cell import Cell
from bench.exact_text import Exchange

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_answers(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_gives_the_same_text_in_pieces(client: OpenAI, model: str, exchanges: list[Exchange]) -> None:
    exchange = exchanges[0]
    chunks = list(
        client.completions.create(
            model=model,
            prompt=exchange.prompt,
            max_tokens=len(exchange.expected_token_ids),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
    )
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == exchange.expected_text
    assert sum(bool(text) for text in texts) > len(exchange.expected_token_ids) // 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(exchange.expected_token_ids)


def test_three_samples_of_one_prompt(client: OpenAI, model: str) -> None:
    def sample() -> list[str]:
        answer = client.completions.create(
            model=model, prompt="Once upon a time", n=3, seed=11, temperature=1.0, max_tokens=16
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    texts = sample()
    assert len(set(texts)) == 3
    assert sample() == texts


def test_stop_string_ends_the_text_before_it(client: OpenAI, model: str, exchanges: list[Exchange]) -> None:
    exchange = exchanges[1]
    words = exchange.expected_text.split(" ")
    stop = f" {words[4]} {words[5]}"
    answer = client.completions.create(
        model=model,
        prompt=exchange.prompt,
        max_tokens=len(exchange.expected_token_ids),
        temperature=0,
        stop=[stop],
        extra_body={"skip_special_tokens": False},
    )
    assert answer.choices[0].text == exchange.expected_text.partition(stop)[0]
    assert answer.choices[0].finish_reason == "stop"


def test_second_request_finds_the_prefix_cached(client: OpenAI, model: str) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 12

    def cached_tokens() -> int:
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=2, extra_body={"cache_salt": "prefix test"}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached_tokens() == 0
    assert cached_tokens() >= 96


def test_prompt_beyond_the_context_names_both_numbers(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=[1] * 9000, max_tokens=1)
    assert caught.value.param == "prompt"
    assert "9000" in caught.value.message


def test_mistake_names_the_parameter(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="Hello", max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="Hello")


def test_metrics_have_the_names_that_dashboards_know(cell: Cell, client: OpenAI, model: str) -> None:
    client.completions.create(model=model, prompt="Hello", max_tokens=2)
    metrics = httpx.get(f"{cell.url}/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
    ):
        assert f"\n{name}" in metrics, name
