"""Every mistake of a client is a 400 in OpenAI's words that names the parameter, and never reaches the scheduler."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError

from gateway import answering
from gateway.routes import body
from gateway.schemas import ChatCompletionRequest
from tests.gateway.fakes import MAX_MODEL_LEN, MODEL_NAME, VOCAB_SIZE, Cell, FakeScheduler, make_cell, running_cell

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(model_folder: Path) -> AsyncIterator[Cell]:
    """One cell for all: a mistake must leave no trace in it."""
    async with running_cell(model_folder) as running:
        yield running


@pytest.fixture(autouse=True)
def forget_submits(cell: Cell) -> None:
    for session in cell.scheduler.sessions:
        session.submits.clear()


async def post(cell: Cell, path: str, content: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of a request; checks the shape of the error, and that the scheduler saw nothing."""
    response = await cell.http.post(path, content=content)
    assert cell.scheduler.submits == []
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return response.status_code, error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 9e-7}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"repetition_penalty": 0.0099}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**65}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "x" * 5000}, "stop[0]"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias"),
        ({"echo": True}, "echo"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"kv_precision_floor": "int3"}, "kv_precision_floor"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*USER, {"role": "tool", "content": "42"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_beam_search": True, "presence_penalty": 0.5}, "presence_penalty"),
        ({"use_beam_search": True, "frequency_penalty": 0.5}, "frequency_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "min_tokens": 1}, "min_tokens"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "n": 17}, "n"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"model": 5}, "model"),
    ],
)
async def test_mistake_in_a_chat_completion_names_its_parameter(cell: Cell, fields: dict[str, Any], param: str) -> None:
    content = json.dumps({"model": MODEL_NAME, "messages": USER} | fields).encode()
    status, error = await post(cell, "/v1/chat/completions", content)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [-1], "echo": True}, "prompt"),
        ({"prompt": [[5], [5, 2**32]], "echo": True}, "prompt"),
        ({"prompt": [2**70], "echo": True}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 25}, "prompt"),  # 16 may wait, and 8 run
        ({"prompt": ["a"] * 13, "n": 2}, "n"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
    ],
)
async def test_mistake_in_a_completion_names_its_parameter(cell: Cell, fields: dict[str, Any], param: str) -> None:
    content = json.dumps({"model": MODEL_NAME, "prompt": "hello"} | fields).encode()
    status, error = await post(cell, "/v1/completions", content)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, rb'{"prompt": "\ud800"}'],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_body_that_is_no_json_object_is_refused(cell: Cell, path: str, content: bytes) -> None:
    status, error = await post(cell, path, content)
    assert (status, error["type"]) == (400, "invalid_request_error")


async def test_limits_are_named_with_both_numbers(model_folder: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.cell = make_cell(kv_capacity_tokens=100)
    async with running_cell(model_folder, scheduler) as cell:
        _status, error = await post(cell, "/v1/completions", json.dumps({"prompt": [5] * 100}).encode())
        assert error["code"] == "context_length_exceeded"
        assert "holds 100 tokens" in error["message"]
        assert "has 100 tokens" in error["message"]
        _status, error = await post(cell, "/v1/completions", json.dumps({"prompt": [5] * 300}).encode())
        assert f"{MAX_MODEL_LEN} tokens" in error["message"]
        assert "has 300 tokens" in error["message"]


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(cell: Cell) -> None:
    status, error = await post(cell, "/v1/completions", json.dumps({"prompt": "x" * 10_000_000}).encode())
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


async def test_length_of_a_prompt_of_ids_is_checked_before_the_ids(cell: Cell) -> None:
    status, error = await post(cell, "/v1/completions", json.dumps({"prompt": [-1] * MAX_MODEL_LEN}).encode())
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


async def test_bound_of_sequences_does_not_shrink_while_workers_are_away(model_folder: Path) -> None:
    scheduler = FakeScheduler()
    async with running_cell(model_folder, scheduler) as cell:
        cell.answer("ok")
        assert (await cell.complete(["a"] * 16)).status_code == 200
        cell.gateway.session.require_cell().max_num_seqs = 0
        assert (await cell.complete(["a"] * 20)).status_code == 429
        assert (await cell.complete(["a"] * 25)).status_code == 400


async def test_least_penalty_and_top_p_are_accepted(cell: Cell) -> None:
    cell.answer("ok")
    assert (await cell.complete(repetition_penalty=0.01, top_p=1e-6)).status_code == 200


async def test_request_that_encodes_too_large_is_refused(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "MAX_SUBMIT_BYTES", 200)
    status, error = await post(cell, "/v1/completions", json.dumps({"prompt": [300] * 150}).encode())
    assert (status, error["param"]) == (400, "prompt")
    assert "more than the 200" in error["message"]


async def test_body_that_is_too_long_is_refused(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 1000)
    status, error = await post(cell, "/v1/completions", json.dumps({"prompt": "x" * 2000}).encode())
    assert status == 400
    assert "longer than 1000 bytes" in error["message"]


async def test_text_with_a_token_that_the_model_lacks_is_refused(model_folder: Path) -> None:
    scheduler = FakeScheduler()
    async with running_cell(model_folder, scheduler) as cell:
        (unknown_id,) = cell.ids("日本")
    scheduler.cell.model.vocab_size = unknown_id
    async with running_cell(model_folder, scheduler) as cell:
        for path, fields in (
            ("/v1/completions", {"prompt": "go to 日本"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go to 日本"}]}),
        ):
            status, error = await post(cell, path, json.dumps(fields).encode())
            assert (status, error["param"]) == (400, next(iter(fields)))
            assert f"token id {unknown_id}" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"messages": USER, "stop": [1] * 1000},
        {"messages": USER, "stop_token_ids": ["x"] * 1000},
        {"messages": USER, "logit_bias": {str(token_id): "x" for token_id in range(2000)}},
    ],
    ids=["messages", "content parts", "stop strings", "stop tokens", "biases"],
)
async def test_check_ends_at_the_first_of_many_mistakes(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(fields)
    assert caught.value.error_count() <= 2  # a union tells one for each of its members


async def test_unknown_model_is_not_found(cell: Cell) -> None:
    content = json.dumps({"model": "gpt-9", "messages": USER}).encode()
    status, error = await post(cell, "/v1/chat/completions", content)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"]


async def test_unknown_page_and_method_have_openai_errors(cell: Cell) -> None:
    status, error = await post(cell, "/v1/nothing", b"{}")
    assert (status, error["type"]) == (404, "invalid_request_error")
    response = await cell.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "error" in response.json()


async def test_unknown_and_neutral_fields_are_accepted(cell: Cell) -> None:
    cell.answer("ok")
    extras: dict[str, Any] = {
        "user": "me",
        "store": False,
        "tools": [],
        "response_format": {"type": "text"},
        "stop": None,
        "foo": 1,
    }
    assert (await cell.chat(**extras)).status_code == 200


async def test_content_type_does_not_matter(cell: Cell) -> None:
    cell.answer("ok")
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = await cell.http.post("/v1/completions", content=b'{"prompt": "hello"}', headers=headers)
    assert response.status_code == 200


async def test_bug_is_an_openai_error_without_its_details(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_submit", lambda *_arguments: 1 // 0)
    response = await cell.complete()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "zero" not in response.text
