import json
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer, processors

from protos import common_pb2
from tests.gateway.fakes import (
    MAX_MODEL_LEN,
    MODEL_NAME,
    Cell,
    end_token_id,
    make_model_folder,
    refuse_with,
    running_cell,
)

END_ID = end_token_id()


def events_of(response: httpx.Response) -> list[str]:
    """The payloads of a stream of server-sent events."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [line.removeprefix("data: ") for line in lines[:-1]]


async def test_whole_answer_has_openai_shape_and_true_usage(cell: Cell) -> None:
    cell.answer("this is an answer", cached_tokens=16, stop_token_id=END_ID)
    answer = (await cell.chat("what is it?")).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "this is an answer", "refusal": None}
    assert choice["finish_reason"] == "stop"
    num_prompt_tokens = len(cell.scheduler.submits[0].token_ids)
    num_output_tokens = len(cell.ids("this is an answer")) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_tokenizer_adds_special_tokens_to_the_templates_on_request(tmp_path: Path) -> None:
    path = make_model_folder(tmp_path) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    start = ("<|start|>", tokenizer.token_to_id("<|start|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|start|> $0", special_tokens=[start])
    tokenizer.save(str(path))
    async with running_cell(tmp_path) as cell:
        cell.answer("ok")
        await cell.chat()
        await cell.chat(add_special_tokens=True)
        plain, special = (list(submit.token_ids) for submit in cell.scheduler.submits)
    assert special == [start[1], *plain]


async def test_prompt_is_what_the_template_makes(cell: Cell) -> None:
    cell.answer("ok")
    messages = [
        {"role": "developer", "content": "be good"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await cell.chat(messages=messages)
    prompt = "<|start|>system\nbe good<|end|>\n<|start|>user\na\nb<|end|>\n<|start|>assistant\n"
    assert list(cell.scheduler.submits[0].token_ids) == cell.ids(prompt)
    await cell.chat(messages=messages, add_generation_prompt=False)
    assert list(cell.scheduler.submits[1].token_ids) == cell.ids(prompt.removesuffix("<|start|>assistant\n"))


async def test_null_in_a_message_is_no_field_of_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ 'tool_calls' in m }} {{ m.content }}{% endfor %}"
    (make_model_folder(tmp_path) / "chat_template.jinja").write_text(template)
    async with running_cell(tmp_path) as cell:
        cell.answer("ok")
        await cell.chat(messages=[{"role": "assistant", "content": None, "tool_calls": None, "audio": None}])
        assert list(cell.scheduler.submits[0].token_ids) == cell.ids("False ")


async def test_stream_has_role_text_finish_reason_usage_and_done(cell: Cell) -> None:
    cell.answer("hello world", stop_token_id=END_ID)
    response = await cell.chat(stream=True, stream_options={"include_usage": True})
    *payloads, done = events_of(response)
    assert done == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-2]]
    assert "".join(delta["content"] for delta in deltas) == "hello world"
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(cell.ids("hello world")) + 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_stream_without_usage_has_no_usage_field(cell: Cell) -> None:
    cell.answer("hello")
    *payloads, _done = events_of(await cell.chat(stream=True))
    assert all("usage" not in json.loads(payload) for payload in payloads)


async def test_official_client_streams(cell: Cell) -> None:
    cell.answer("the quick brown fox")
    stream = await cell.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}], stream=True, n=2
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "the quick brown fox", 1: "the quick brown fox"}


async def test_official_client_gets_logprobs(cell: Cell) -> None:
    cell.answer("é good")
    answer = await cell.openai.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.logprob for token in logprobs.content] == [-0.5] * len(logprobs.content)
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    # A token that is part of a character has no text of its own, but its bytes.
    raw = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert raw.decode() == "é good"
    assert logprobs.content[0].token == "\N{REPLACEMENT CHARACTER}"


async def test_sampling_parameters_reach_the_scheduler(cell: Cell) -> None:
    cell.answer("ok")
    await cell.chat(
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=-1,
        max_tokens=9,
        max_completion_tokens=5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3, 4],
        logit_bias={"5": -100, "6": 1.5},
        priority=-3,
        cache_salt="salt",
        kv_precision_floor="k8v4",
    )
    submit = cell.scheduler.submits[0]
    assert submit.priority == -3
    assert submit.cache_salt == "salt"
    assert submit.kv_precision_floor == common_pb2.KV_FORMAT_K8V4
    assert submit.sampling == common_pb2.SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=2,
        seed=2**64 - 1,
        max_tokens=5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[3, 4],
        logit_bias_token_ids=[5, 6],
        logit_bias_values=[-100, 1.5],
    )


async def test_defaults_are_filled_in_and_seeds_differ(cell: Cell) -> None:
    cell.answer("ok")
    await cell.chat()
    await cell.chat(seed=None)
    first, second = (submit.sampling for submit in cell.scheduler.submits)
    assert (first.temperature, first.top_p, first.repetition_penalty) == (1, 1, 1)
    assert first.max_tokens == MAX_MODEL_LEN - len(cell.scheduler.submits[0].token_ids)
    assert first.seed != second.seed
    assert not first.HasField("num_logprobs")


async def test_max_tokens_is_limited_by_the_context(cell: Cell) -> None:
    cell.answer("ok")
    await cell.chat(max_tokens=100_000)
    submit = cell.scheduler.submits[0]
    assert submit.sampling.max_tokens == MAX_MODEL_LEN - len(submit.token_ids)


async def test_model_may_be_left_out(cell: Cell) -> None:
    cell.answer("ok")
    assert (await cell.chat(model=None)).status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "error_class"),
    [
        (common_pb2.ERROR_CODE_INVALID_ARGUMENT, 400, openai.BadRequestError),
        (common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, 429, openai.RateLimitError),
        (common_pb2.ERROR_CODE_UNAVAILABLE, 503, openai.InternalServerError),
        (common_pb2.ERROR_CODE_DEADLINE_EXCEEDED, 504, openai.InternalServerError),
        (common_pb2.ERROR_CODE_INTERNAL, 500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_of_the_scheduler_gets_its_status(
    cell: Cell,
    code: "common_pb2.ErrorCode.ValueType",
    status: int,
    error_class: type[openai.APIStatusError],
    stream: bool,
) -> None:
    cell.scheduler.on_submit = refuse_with(code, "no, because", param="n")
    with pytest.raises(error_class, match="no, because") as caught:
        await cell.openai.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}], stream=stream
        )
    assert caught.value.status_code == status
    assert caught.value.param == "n"
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


async def test_error_after_the_stream_began_is_an_event(cell: Cell) -> None:
    def fail_late(session: object, submit: object) -> None:
        request_id = cell.scheduler.submits[0].request_id
        cell.scheduler.session.run(request_id, 0, cell.ids("hello"))
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="a step failed")
        cell.scheduler.session.run(
            request_id, len(cell.ids("hello")), [], finish_reason=common_pb2.FINISH_REASON_ERROR, error=error
        )

    cell.scheduler.on_submit = fail_late
    *_, failure, done = events_of(await cell.chat(stream=True))
    assert json.loads(failure)["error"] == {
        "message": "a step failed",
        "type": "internal_server_error",
        "param": None,
        "code": "internal_error",
    }
    assert done == "[DONE]"
