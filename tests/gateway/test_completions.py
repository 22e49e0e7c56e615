import json
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.gateway.fakes import (
    MODEL_NAME,
    VOCAB_SIZE,
    Cell,
    FakeScheduler,
    answer_with,
    end_token_id,
    make_byte_level_tokenizer,
    make_cell,
    make_logprobs,
    make_usage,
    running_cell,
)
from tests.gateway.test_chat import events_of

END_ID = end_token_id()


async def test_whole_answer_has_openai_shape(cell: Cell) -> None:
    cell.answer(" world", cached_tokens=1)
    answer = (await cell.complete("hello", max_tokens=50)).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": " world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == len(cell.ids("hello"))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("hello", 1), (["hello", "it is"], 2), ([5, 6, 7], 1), ([[5, 6], [7], [8, 9]], 3), (["hello"], 1)],
)
async def test_every_form_of_prompt_is_taken(cell: Cell, prompt: Any, num_prompts: int) -> None:
    cell.answer("ok")
    answer = await cell.openai.completions.create(model=MODEL_NAME, prompt=prompt, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = [cell.ids(item) if isinstance(item, str) else item for item in prompts]
    assert [list(submit.token_ids) for submit in cell.scheduler.submits] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_official_client_streams_several_prompts(cell: Cell) -> None:
    cell.answer("the quick")
    texts = {0: "", 1: ""}
    stream = await cell.openai.completions.create(
        model=MODEL_NAME, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "the quick", 1: "the quick"}
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == 2 * len(cell.ids("the quick"))


async def test_echo_begins_with_the_prompt(cell: Cell) -> None:
    cell.answer(" world")
    prompts = [cell.ids("hello"), cell.ids("it is")]
    answer = (await cell.complete(prompts, echo=True)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hello world", "it is world"]
    *payloads, _done = events_of(await cell.complete("hello", echo=True, stream=True))
    assert "".join(json.loads(payload)["choices"][0]["text"] for payload in payloads) == "hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_offsets_into_the_text(cell: Cell, stream: bool) -> None:
    cell.answer("the quick fox")
    response = await cell.complete("hello", logprobs=1, stream=stream)
    if stream:
        *payloads, _done = events_of(response)
        parts = [json.loads(payload)["choices"][0]["logprobs"] for payload in payloads[:-1]]
    else:
        parts = [response.json()["choices"][0]["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    assert "".join(tokens) == "the quick fox"
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert [("the quick fox"[offset:]).startswith(token) for token, offset in zip(tokens, offsets, strict=True)]
    assert offsets == [sum(map(len, tokens[:idx])) for idx in range(len(tokens))]
    assert [top for part in parts for top in part["top_logprobs"]] == [{token: -0.5} for token in tokens]


async def test_logprobs_that_json_cannot_carry_become_the_least(cell: Cell) -> None:
    def answer(_session: object, submit: Any) -> None:
        entry = common_pb2.TokenLogprobs(logprob=float("-inf"), top_token_ids=[3], top_logprobs=[float("nan")])
        cell.scheduler.session.run(
            submit.request_id, 0, [2], logprobs=[entry], finish_reason=common_pb2.FINISH_REASON_LENGTH
        )

    cell.scheduler.on_submit = answer
    logprobs = (await cell.complete("hello", logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert set(logprobs["top_logprobs"][0].values()) == {-9999.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_text_and_aborts_the_sequence(cell: Cell, stream: bool) -> None:
    token_ids = cell.ids("the quick brown fox jumps")

    def answer_half(session: Any, submit: Any) -> None:
        for idx, token_id in enumerate(token_ids):
            session.run(submit.request_id, idx, [token_id])

    cell.scheduler.on_submit = answer_half
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await cell.complete("hello", stop=["zzz", "wn f"], **options)
    if stream:
        chunks = [json.loads(payload) for payload in events_of(response)[:-1]]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        last_choice, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
    else:
        last_choice, usage = response.json()["choices"][0], response.json()["usage"]
        text = last_choice["text"]
    assert text == "the quick bro"
    assert (last_choice["finish_reason"], last_choice["stop_reason"]) == ("stop", "wn f")
    submit = cell.scheduler.submits[0]
    assert [(abort.request_id, abort.index) for abort in cell.scheduler.aborts] == [(submit.request_id, 0)]
    # Tokens after the one that completed the stop string came, and do not count.
    tokenizer = make_byte_level_tokenizer()
    num_kept = next(n for n in range(len(token_ids)) if "wn f" in tokenizer.decode(token_ids[:n]))
    assert usage["completion_tokens"] == num_kept < len(token_ids)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({}, 200),
        ({"kv_precision_floor": "int8"}, 100),
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
    ],
)
async def test_room_for_an_answer_is_what_its_floor_leaves(
    model_folder: Path, fields: dict[str, Any], room: int
) -> None:
    scheduler = FakeScheduler()
    scheduler.cell = make_cell(kv_capacity_tokens=210, kv_capacity_tokens_by_floor={common_pb2.KV_FORMAT_INT8: 110})
    async with running_cell(model_folder, scheduler) as cell:
        cell.answer("ok")
        await cell.complete([5] * 10, **fields)
    assert scheduler.submits[0].sampling.max_tokens == room


async def test_stop_string_is_kept_on_request(cell: Cell) -> None:
    cell.answer("the quick brown fox")
    answer = (await cell.complete("hello", stop="quick", include_stop_str_in_output=True)).json()
    assert answer["choices"][0]["text"] == "the quick"


async def test_stop_string_within_min_tokens_does_not_count(cell: Cell) -> None:
    cell.answer("the quick the quick", stop_token_id=END_ID)
    num_tokens = len(cell.ids("the quick"))
    answer = (await cell.complete("hello", stop="quick", min_tokens=num_tokens)).json()
    assert answer["choices"][0]["text"] == "the quick the "


async def test_stop_string_that_begins_within_min_tokens_counts(cell: Cell) -> None:
    cell.answer("the quick brown fox")
    num_tokens = len(cell.ids("the quick"))
    answer = (await cell.complete("hello", stop="quick brown", min_tokens=num_tokens)).json()
    assert answer["choices"][0]["text"] == "the "


async def test_text_that_only_began_a_stop_string_is_sent_at_the_end(cell: Cell) -> None:
    cell.answer("the quick")
    *payloads, _done = events_of(await cell.complete("hello", stop="quickly", stream=True))
    assert "".join(json.loads(payload)["choices"][0]["text"] for payload in payloads) == "the quick"


@pytest.mark.parametrize(("keep", "text"), [(False, "the"), (True, "the fox")])
async def test_stop_token_is_no_text_unless_asked_for(cell: Cell, keep: bool, text: str) -> None:
    fox_ids = cell.ids(" fox")
    stop_token_id = fox_ids[-1]
    cell.scheduler.on_submit = answer_with([*cell.ids("the"), *fox_ids[:-1]], stop_token_id=stop_token_id)
    response = await cell.complete("hello", stop_token_ids=[stop_token_id], include_stop_str_in_output=keep)
    choice = response.json()["choices"][0]
    expected = "the fox" if keep else make_byte_level_tokenizer().decode([*cell.ids("the"), *fox_ids[:-1]])
    assert choice["text"] == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_token_id)


async def test_special_tokens_show_on_request(cell: Cell) -> None:
    cell.scheduler.on_submit = answer_with([*cell.ids("the"), END_ID])
    assert (await cell.complete()).json()["choices"][0]["text"] == "the"
    answer = (await cell.complete(skip_special_tokens=False)).json()
    assert answer["choices"][0]["text"] == "the<|end|>"


async def test_ids_of_the_model_that_are_no_tokens_have_no_text(cell: Cell) -> None:
    cell.scheduler.on_submit = answer_with([*cell.ids("the"), VOCAB_SIZE - 1, *cell.ids(" fox")])
    assert (await cell.complete()).json()["choices"][0]["text"] == "the fox"


def answer_beams(cell: Cell, texts: list[str]) -> None:
    """Answer a beam search as the scheduler does: all of an answer in one run, with its end."""

    def answer(session: Any, submit: Any) -> None:
        session.run(submit.request_id, 0, [], usage=make_usage())
        for index, text in enumerate(texts):
            token_ids = cell.ids(text)
            fields: dict[str, Any] = {"index": index, "usage": make_usage(len(token_ids))}
            if submit.sampling.HasField("num_logprobs"):
                fields["logprobs"] = [make_logprobs(token_id, submit.sampling.num_logprobs) for token_id in token_ids]
            reason = common_pb2.FINISH_REASON_LENGTH
            session.run(submit.request_id, 0, token_ids, finish_reason=reason, **fields)

    cell.scheduler.on_submit = answer


async def test_beam_search_is_asked_for_with_its_width_and_length_penalty(cell: Cell) -> None:
    answer_beams(cell, ["the quick", "the lazy dog"])
    response = await cell.complete("hello", use_beam_search=True, n=2, length_penalty=0.5, temperature=0.7, top_p=0.9)
    submit = cell.scheduler.submits[0]
    assert (submit.n, submit.beam_search.length_penalty) == (2, 0.5)
    assert [(choice["index"], choice["text"]) for choice in response.json()["choices"]] == [
        (0, "the quick"),
        (1, "the lazy dog"),
    ]
    assert response.json()["usage"]["completion_tokens"] == len(cell.ids("the quick")) + len(cell.ids("the lazy dog"))
    await cell.complete("hello", use_beam_search=True)
    submit = cell.scheduler.submits[1]
    assert (submit.n, submit.beam_search.length_penalty) == (1, 1.0)
    await cell.complete("hello", use_beam_search=False, length_penalty=1)
    assert not cell.scheduler.submits[2].HasField("beam_search")


async def test_beam_search_that_is_streamed_sends_each_answer_whole(cell: Cell) -> None:
    answer_beams(cell, ["the quick", "the lazy dog"])
    *payloads, _done = events_of(await cell.complete("hello", use_beam_search=True, n=2, stream=True))
    choices = [json.loads(payload)["choices"][0] for payload in payloads]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (0, "the quick", None),
        (0, "", "length"),
        (1, "the lazy dog", None),
        (1, "", "length"),
    ]


async def test_beam_search_has_logprobs_on_request(cell: Cell) -> None:
    answer_beams(cell, ["the quick"])
    answer = (await cell.complete("hello", use_beam_search=True, logprobs=1)).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "the quick"
    assert logprobs["token_logprobs"] == [-0.5] * len(cell.ids("the quick"))
