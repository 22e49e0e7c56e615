"""Clients that leave, do not read, or are too many; and a gateway that drains."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import session
from protos import common_pb2, scheduler_pb2
from tests.gateway.fakes import (
    Cell,
    FakeSession,
    eventually,
    make_byte_level_tokenizer,
    make_model_folder,
    make_usage,
    refuse_with,
    running_cell,
)

LENGTH = common_pb2.FINISH_REASON_LENGTH


async def submitted(cell: Cell, num_submits: int = 1) -> scheduler_pb2.Submit:
    await eventually(lambda: len(cell.scheduler.submits) >= num_submits)
    return cell.scheduler.submits[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_client_that_leaves_aborts_its_request(cell: Cell, stream: bool, num_tokens: int) -> None:
    leaving = asyncio.create_task(cell.complete(["a", "b"], stream=stream))
    await submitted(cell, 2)
    for submit in cell.scheduler.submits:
        cell.scheduler.session.run(submit.request_id, 0, cell.ids("the quick")[:num_tokens])
    leaving.cancel()
    await eventually(lambda: len(cell.scheduler.aborts) == 2)
    assert {abort.request_id for abort in cell.scheduler.aborts} == {
        submit.request_id for submit in cell.scheduler.submits
    }
    assert not any(abort.HasField("index") for abort in cell.scheduler.aborts)
    assert cell.gateway.session.num_unstarted == 0


async def test_client_that_leaves_its_stream_aborts_it(cell: Cell) -> None:
    cell.scheduler.on_submit = lambda session, submit: session.run(submit.request_id, 0, cell.ids("the"))
    async with cell.http.stream("POST", "/v1/completions", json={"prompt": "hello", "stream": True}) as response:
        assert "the" in await anext(response.aiter_text())
        assert cell.scheduler.aborts == []
    await eventually(lambda: len(cell.scheduler.aborts) == 1)
    assert cell.scheduler.aborts[0].request_id == cell.scheduler.submits[0].request_id


async def test_client_that_does_not_read_is_aborted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The socket buffers of both sides hold megabytes, so each token has many bytes.
    folder = make_model_folder(tmp_path, added_token="x" * 200_000)
    long_token_id = make_byte_level_tokenizer().get_vocab_size()
    async with running_cell(folder, client_stall_seconds=0.3) as cell:
        url = httpx.URL(cell.url)
        _reader, writer = await asyncio.open_connection(url.host, url.port)
        body = b'{"prompt": "hello", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        submit = await submitted(cell)
        cell.scheduler.session.run(submit.request_id, 0, [long_token_id] * 100)
        num_sent = 100

        def is_aborted() -> bool:
            # One write fills the buffers; the next one has to wait.
            nonlocal num_sent
            cell.scheduler.session.run(submit.request_id, num_sent, [5])
            num_sent += 1
            return bool(cell.scheduler.aborts)

        await eventually(is_aborted, 30)
        assert "has not read its stream" in caplog.text
        writer.close()


async def test_queue_that_is_full_refuses_before_tokenizing(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = cell.scheduler.cell.max_queued_requests + cell.scheduler.cell.max_num_seqs
    waiting = [asyncio.create_task(cell.complete()) for _ in range(bound)]
    await submitted(cell, bound)

    async def fail(*_arguments: Any) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(cell.gateway.prompts, "of_completion", fail)
    response = await cell.complete()
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert (await cell.http.get("/health")).status_code == 200
    monkeypatch.undo()
    for submit in cell.scheduler.submits:
        cell.scheduler.session.run(submit.request_id, 0, [5], finish_reason=LENGTH, usage=make_usage())
    assert {(await task).status_code for task in waiting} == {200}
    cell.answer("ok")
    assert (await cell.complete()).status_code == 200


async def test_tenant_that_fills_the_queue_takes_no_place_from_another(cell: Cell) -> None:
    """As long as all of them have less than twice a tenant's room, and known before tokenizing."""
    limits = cell.scheduler.cell
    bound = limits.max_queued_requests + limits.max_num_seqs
    num_most = bound + limits.max_queued_requests
    waiting = [asyncio.create_task(cell.complete(user="a")) for _ in range(bound)]
    await submitted(cell, bound)
    assert (await cell.complete(user="a")).status_code == 429
    waiting += [asyncio.create_task(cell.complete(user=f"b{number % 2}")) for number in range(num_most - bound)]
    await submitted(cell, num_most)
    response = await cell.complete(user="c")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert len(cell.scheduler.submits) == num_most
    for submit in cell.scheduler.submits:
        cell.scheduler.session.run(submit.request_id, 0, [5], finish_reason=LENGTH, usage=make_usage())
    assert {(await task).status_code for task in waiting} == {200}


@pytest.fixture
def _refusals_hold_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REFUSAL_HOLDS_S", 60.0)


@pytest.mark.usefixtures("_refusals_hold_long")
async def test_refusal_of_one_tenant_holds_for_no_other(cell: Cell) -> None:
    cell.scheduler.on_submit = refuse_with(common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "the queue is full")
    for tenant in ("a", "b", "a"):
        assert (await cell.complete(user=tenant)).status_code == 429
    assert [submit.tenant for submit in cell.scheduler.submits] == ["a", "b"]


@pytest.mark.usefixtures("_refusals_hold_long")
async def test_refusal_by_the_scheduler_holds_for_the_next_requests(cell: Cell) -> None:
    cell.scheduler.on_submit = refuse_with(common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED, "the queue is full")
    assert (await cell.complete()).status_code == 429
    assert (await cell.complete()).status_code == 429
    assert len(cell.scheduler.submits) == 1


async def test_draining_finishes_streams_and_refuses_new_requests(cell: Cell) -> None:
    token_ids = cell.ids("the quick")
    running = asyncio.create_task(cell.complete(stream=True))
    submit = await submitted(cell)
    cell.scheduler.session.run(submit.request_id, 0, token_ids[:1])
    draining = asyncio.create_task(cell.gateway.admission.drain(60))
    await eventually(lambda: cell.gateway.admission.is_draining)
    response = await cell.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await cell.http.get("/ready")).status_code == 503
    assert (await cell.http.get("/health")).status_code == 200
    assert not draining.done()
    cell.scheduler.session.run(submit.request_id, 1, token_ids[1:], finish_reason=LENGTH, usage=make_usage())
    assert (await running).text.endswith("data: [DONE]\n\n")
    assert await draining


async def test_draining_waits_for_a_request_that_is_being_tokenized(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, is_tokenizing, may_go_on = cell.gateway.prompts.tokenizer, asyncio.Event(), asyncio.Event()
    encode = tokenizer.encode

    async def encode_slowly(text: str, add_special_tokens: bool, param: str) -> list[int]:
        is_tokenizing.set()
        await may_go_on.wait()
        return await encode(text, add_special_tokens, param)

    monkeypatch.setattr(tokenizer, "encode", encode_slowly)
    cell.answer("the quick")
    running = asyncio.create_task(cell.complete())
    await is_tokenizing.wait()
    assert not await cell.gateway.admission.drain(0)
    draining = asyncio.create_task(cell.gateway.admission.drain(60))
    may_go_on.set()
    assert (await running).status_code == 200
    assert await draining


async def test_draining_gives_up_when_its_time_is_over(cell: Cell) -> None:
    running = asyncio.create_task(cell.complete())
    await submitted(cell)
    assert not await cell.gateway.admission.drain(0.05)
    running.cancel()


async def test_two_hundred_streams_half_of_them_cut_leave_nothing_behind(cell: Cell) -> None:
    cell.scheduler.cell.max_queued_requests = 1000
    await cell.gateway.session._refresh_cell(cell.gateway.session._stub)  # type: ignore[arg-type]
    token_ids = cell.ids("the quick brown fox")

    def first_token(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        session.run(submit.request_id, 0, token_ids[:1])

    cell.scheduler.on_submit = first_token
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cell.url, limits=limits, timeout=60) as http:
        body = {"prompt": "hello", "stream": True}
        streams = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(200)]
        await submitted(cell, 200)
        for stream in streams[::2]:
            stream.cancel()
        await eventually(lambda: len(cell.scheduler.aborts) == 100, 30)
        for submit in cell.scheduler.submits:
            cell.scheduler.session.run(submit.request_id, 1, token_ids[1:], finish_reason=LENGTH, usage=make_usage())
        texts = [(await stream).text for stream in streams[1::2]]
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert cell.gateway.session._generations == {}
    assert cell.gateway.admission._num_open == 0
