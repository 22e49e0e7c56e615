"""Models, health, metrics, version, and the tokenizer's pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.routes import misc
from gateway.schemas import MAX_SHOWN_TOKENS
from protos import scheduler_pb2
from tests.gateway.fakes import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    VOCAB_SIZE,
    Cell,
    eventually,
    make_byte_level_tokenizer,
    running_cell,
)


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


async def metric(cell: Cell, name: str, **labels: str) -> float:
    """The value of the one sample with this name, the model's name and these labels; one of vLLM's has our name too."""
    page = (await cell.http.get("/metrics")).text
    wanted = {"model_name": MODEL_NAME} | labels
    names = {name} if name == "vllm:gpu_cache_usage_perc" else {name, name.replace("vllm:", "quire_")}
    values = [value for found, has, value in samples(page) if found in names and has == wanted]
    assert values == values[:1] * len(names), f"{name}: {values}"
    return values[0]


async def test_model_is_listed_and_retrieved(cell: Cell) -> None:
    models = await cell.openai.models.list()
    assert [model.id for model in models.data] == [MODEL_NAME]
    assert (await cell.openai.models.retrieve(MODEL_NAME)).id == MODEL_NAME
    assert (await cell.http.get("/v1/models")).json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert (await cell.http.get("/v1/models/org/other")).status_code == 404


async def test_served_name_may_be_chosen(model_folder: Path) -> None:
    async with running_cell(model_folder, served_model_name="mine/best") as cell:
        cell.answer("ok")
        assert (await cell.complete(model=MODEL_NAME)).status_code == 404
        assert (await cell.complete(model="mine/best")).json()["model"] == "mine/best"
        assert (await cell.http.get("/v1/models/mine/best")).json()["id"] == "mine/best"


async def test_version_is_the_distribution_s(cell: Cell) -> None:
    assert set((await cell.http.get("/version")).json()) == {"version"}


async def test_ready_needs_a_worker_that_can_serve(cell: Cell) -> None:
    assert (await cell.http.get("/ready")).status_code == 200
    cell.scheduler.stats = scheduler_pb2.CellStats()
    assert (await cell.http.get("/ready")).status_code == 503
    lane = scheduler_pb2.LaneStats()
    cell.scheduler.stats = scheduler_pb2.CellStats(lanes=[lane], draining=True)
    assert (await cell.http.get("/ready")).status_code == 503
    cell.scheduler.stats = scheduler_pb2.CellStats(lanes=[scheduler_pb2.LaneStats(draining=True)])
    assert (await cell.http.get("/ready")).status_code == 503
    await cell.scheduler.stop()
    response = await cell.http.get("/ready")
    assert response.status_code == 503
    assert "scheduler is away" in response.json()["error"]["message"]
    assert (await cell.http.get("/health")).status_code == 200


async def test_metrics_of_the_cell_have_vllm_names(cell: Cell) -> None:
    lanes = [
        scheduler_pb2.LaneStats(address="a:1", num_blocks=100, num_free_blocks=50, num_cached_blocks=20),
        scheduler_pb2.LaneStats(address="b:2", num_blocks=100, num_free_blocks=100, num_quarantined_blocks=0),
    ]
    cell.scheduler.stats = scheduler_pb2.CellStats(
        lanes=lanes,
        num_waiting_seqs=3,
        num_running_seqs=4,
        prefix_cache_queries_total=500,
        prefix_cache_hits_total=200,
        num_preemptions_total=6,
    )
    expected = {
        "vllm:num_requests_waiting": 3,
        "vllm:num_requests_running": 4,
        "vllm:kv_cache_usage_perc": 0.15,
        "vllm:gpu_cache_usage_perc": 0.15,
        "vllm:prefix_cache_queries_total": 500,
        "vllm:prefix_cache_hits_total": 200,
        "vllm:num_preemptions_total": 6,
        "quire_workers": 2,
    }
    assert {name: pytest.approx(await metric(cell, name)) for name in expected} == expected
    page = (await cell.http.get("/metrics")).text
    assert ("quire_kv_blocks", {"worker": "a:1", "state": "referenced"}, 30.0) in list(samples(page))


async def test_metrics_of_the_shared_index_are_shown_where_there_is_one(cell: Cell) -> None:
    assert "quire_prefix_index" not in (await cell.http.get("/metrics")).text
    index = scheduler_pb2.SharedIndexStats(
        up=True, num_live_cells=2, num_pending_writes=5, num_writes_total=7, lookup_ms_total=1500, num_outages_total=1
    )
    cell.scheduler.stats = scheduler_pb2.CellStats(shared_index=index)
    expected = {
        "quire_prefix_index_up": 1,
        "quire_prefix_index_live_cells": 2,
        "quire_prefix_index_pending_writes": 5,
        "quire_prefix_index_writes_total": 7,
        "quire_prefix_index_lookup_seconds_total": 1.5,
        "quire_prefix_index_outages_total": 1,
    }
    assert {name: await metric(cell, name) for name in expected} == expected


async def test_metrics_count_requests_and_tokens(cell: Cell) -> None:
    token_ids = cell.ids("the quick")
    cell.answer("the quick")
    await cell.complete("hello", n=2)
    await cell.complete("hello", stop="e")
    await eventually(lambda: cell.gateway.admission._num_open == 0)
    assert await metric(cell, "vllm:request_success_total", finished_reason="length") == 2
    assert await metric(cell, "vllm:request_success_total", finished_reason="stop") == 1
    assert await metric(cell, "vllm:prompt_tokens_total") == 2 * len(cell.ids("hello"))
    assert await metric(cell, "vllm:time_to_first_token_seconds_count") == 3
    assert await metric(cell, "vllm:inter_token_latency_seconds_count") >= 2 * (len(token_ids) - 1)
    assert await metric(cell, "vllm:e2e_request_latency_seconds_count") == 2
    assert await metric(cell, "vllm:generation_tokens_total") >= 2 * len(token_ids)
    assert await metric(cell, "quire_gateway_requests_open") == 0


async def test_metrics_of_the_gateway_outlive_the_scheduler(cell: Cell) -> None:
    cell.answer("ok")
    await cell.complete()
    await cell.scheduler.stop()
    await eventually(lambda: not cell.gateway.session.is_connected)
    assert await metric(cell, "quire_scheduler_up") == 0
    assert await metric(cell, "vllm:request_success_total", finished_reason="length") == 1
    assert "vllm:num_requests_running" not in (await cell.http.get("/metrics")).text


async def test_tokenize_and_detokenize(cell: Cell) -> None:
    answer = (await cell.http.post("/tokenize", json={"prompt": "the fox", "return_token_strs": True})).json()
    token_ids = cell.ids("the fox")
    tokenizer = make_byte_level_tokenizer()
    assert answer == {
        "count": len(token_ids),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": token_ids,
        "token_strs": [tokenizer.id_to_token(token_id) for token_id in token_ids],
    }
    text = (await cell.http.post("/detokenize", json={"model": MODEL_NAME, "tokens": token_ids})).json()
    assert text == {"prompt": "the fox"}
    response = await cell.http.post("/detokenize", json={"tokens": [VOCAB_SIZE]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")


async def test_more_tokens_than_can_be_shown_are_refused(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    response = await cell.http.post("/detokenize", json={"tokens": [1] * (MAX_SHOWN_TOKENS + 1)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
    monkeypatch.setattr(misc, "MAX_SHOWN_TOKENS", 2)
    for param, text in (("prompt", "the quick fox"), ("messages", [{"role": "user", "content": "hi"}])):
        response = await cell.http.post("/tokenize", json={param: text})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_tokenize_takes_a_conversation(cell: Cell) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await cell.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert answer["tokens"] == cell.ids("<|start|>user\nhi<|end|>\n")
    assert answer["token_strs"] is None


async def test_openapi_schema_describes_the_bodies(cell: Cell) -> None:
    schema = (await cell.http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "top_k"} <= set(body["properties"])
