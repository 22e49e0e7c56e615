"""What happens to streams when the scheduler, or the connection to it, breaks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway import link
from protos import common_pb2, scheduler_pb2
from tests.gateway.fakes import Cell, FakeScheduler, FakeSession, eventually, make_cell, make_usage, running_cell

LENGTH = common_pb2.FINISH_REASON_LENGTH
TEXT = "the quick brown fox"


async def submitted(cell: Cell, num_submits: int = 1) -> scheduler_pb2.Submit:
    await eventually(lambda: len(cell.scheduler.submits) >= num_submits)
    return cell.scheduler.submits[-1]


async def until_at_stake(cell: Cell) -> None:
    """Return when the gateway knows that its one request is being computed."""
    generation = next(iter(cell.gateway.session._generations.values()))
    await eventually(lambda: generation._is_at_stake)


def text_of(response: Any) -> str:
    return str(response.json()["choices"][0]["text"])


async def test_hello_and_signs_of_life_are_sent(cell: Cell) -> None:
    session = cell.scheduler.session
    assert session.hello.gateway_id
    assert list(session.hello.request_ids) == []
    await eventually(lambda: session.num_signs_of_life >= 2)


async def test_stream_goes_on_where_it_stopped_when_the_scheduler_is_back(cell: Cell) -> None:
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete(n=2, logprobs=0))
    submit = await submitted(cell)
    first = cell.scheduler.session
    entry = common_pb2.TokenLogprobs(logprob=-0.25)
    first.run(submit.request_id, 0, token_ids[:3], index=0, logprobs=[entry] * 3)
    first.run(submit.request_id, 0, token_ids, index=1, finish_reason=LENGTH, logprobs=[entry] * len(token_ids))
    await eventually(lambda: cell.gateway.session._generations[submit.request_id]._num_open == 1)
    await cell.scheduler.stop()
    await eventually(lambda: not cell.gateway.session.is_connected)
    await cell.scheduler.start()
    again = await submitted(cell, 2)
    second = cell.scheduler.session
    assert second.hello.session_number > first.hello.session_number
    assert second.hello.gateway_id == first.hello.gateway_id
    assert list(second.hello.request_ids) == [submit.request_id]
    assert (submit.is_resubmit, again.is_resubmit) == (False, True)
    assert again.token_ids == submit.token_ids
    assert again.sampling == submit.sampling
    assert list(again.delivered) == [
        scheduler_pb2.Delivered(index=0, token_ids=token_ids[:3], cumulative_logprob=-0.75),
        scheduler_pb2.Delivered(
            index=1, token_ids=token_ids, finish_reason=LENGTH, cumulative_logprob=-0.25 * len(token_ids)
        ),
    ]
    rest = [entry] * (len(token_ids) - 3)
    second.run(submit.request_id, 3, token_ids[3:], finish_reason=LENGTH, logprobs=rest, usage=make_usage())
    choices = (await answering).json()["choices"]
    assert [choice["text"] for choice in choices] == [TEXT, TEXT]


async def test_repeated_tokens_are_dropped(cell: Cell) -> None:
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete())
    submit = await submitted(cell)
    session = cell.scheduler.session
    session.run(submit.request_id, 0, token_ids[:4])
    session.run(submit.request_id, 0, token_ids[:2])
    session.run(submit.request_id, 2, token_ids[2:5])
    session.run(submit.request_id, 0, token_ids, finish_reason=LENGTH, usage=make_usage())
    session.run(submit.request_id, 0, token_ids, finish_reason=LENGTH, usage=make_usage())
    response = await answering
    assert text_of(response) == TEXT
    assert response.json()["usage"]["completion_tokens"] == len(token_ids)


async def test_missing_tokens_are_asked_for_once(cell: Cell) -> None:
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete())
    submit = await submitted(cell)
    session = cell.scheduler.session
    session.run(submit.request_id, 0, token_ids[:2])
    session.run(submit.request_id, 3, token_ids[3:4])
    session.run(submit.request_id, 4, token_ids[4:5])
    again = await submitted(cell, 2)
    assert [list(delivered.token_ids) for delivered in again.delivered] == [token_ids[:2]]
    session.run(submit.request_id, 2, token_ids[2:], finish_reason=LENGTH, usage=make_usage())
    assert text_of(await answering) == TEXT
    assert len(cell.scheduler.submits) == 2


async def test_request_waits_while_the_scheduler_is_away(cell: Cell) -> None:
    await cell.scheduler.stop()
    await eventually(lambda: not cell.gateway.session.is_connected)
    cell.answer("here I am")
    answering = asyncio.create_task(cell.complete())
    await eventually(lambda: cell.gateway.session.num_unstarted == 1)
    await cell.scheduler.start()
    assert text_of(await answering) == "here I am"
    assert not cell.scheduler.submits[0].is_resubmit, "no scheduler has let it in yet"


async def test_request_that_ended_while_the_scheduler_was_away_is_not_named_again(cell: Cell) -> None:
    leaving = asyncio.create_task(cell.complete())
    await submitted(cell)
    await cell.scheduler.stop()
    await eventually(lambda: not cell.gateway.session.is_connected)
    leaving.cancel()
    await eventually(lambda: cell.gateway.session.num_unstarted == 0)
    await cell.scheduler.start()
    await eventually(lambda: len(cell.scheduler.sessions) == 2)
    assert list(cell.scheduler.session.hello.request_ids) == []


async def test_session_that_the_scheduler_ends_is_opened_anew(cell: Cell) -> None:
    cell.scheduler.session.close()
    await eventually(lambda: len(cell.scheduler.sessions) == 2)
    cell.answer("ok")
    assert text_of(await cell.complete()) == "ok"


async def break_session(cell: Cell) -> None:
    """End the session from the scheduler's side; return when the request has been submitted in the next one."""
    num_submits, num_sessions = len(cell.scheduler.submits), len(cell.scheduler.sessions)
    cell.scheduler.session.close()
    await eventually(lambda: len(cell.scheduler.sessions) > num_sessions)
    await eventually(lambda: len(cell.scheduler.submits) > num_submits or not cell.gateway.session._generations)


async def test_request_at_stake_at_three_breaks_in_a_row_ends_with_an_error(cell: Cell) -> None:
    cell.scheduler.on_submit = lambda session, submit: session.run(submit.request_id, 0, [], usage=make_usage())
    answering = asyncio.create_task(cell.complete())
    await submitted(cell)
    for _ in range(3):
        await until_at_stake(cell)
        await break_session(cell)
    response = await answering
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "3 failures of the scheduler" in response.json()["error"]["message"]
    assert list(cell.scheduler.session.hello.request_ids) == []


async def test_new_token_makes_breaks_count_anew(cell: Cell) -> None:
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete())
    submit = await submitted(cell)
    for idx, token_id in enumerate(token_ids[:4]):
        cell.scheduler.session.run(submit.request_id, idx, [token_id])
        await until_at_stake(cell)
        await break_session(cell)
    cell.scheduler.session.run(submit.request_id, 4, token_ids[4:], finish_reason=LENGTH, usage=make_usage())
    assert text_of(await answering) == TEXT


async def test_waiting_request_outlasts_any_number_of_breaks(cell: Cell) -> None:
    answering = asyncio.create_task(cell.complete())
    await submitted(cell)
    for _ in range(4):
        await break_session(cell)
    cell.scheduler.session.run(
        cell.scheduler.submits[-1].request_id, 0, cell.ids("ok"), finish_reason=LENGTH, usage=make_usage()
    )
    assert text_of(await answering) == "ok"


async def test_cached_tokens_are_those_of_the_first_attempt(cell: Cell) -> None:
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete())
    submit = await submitted(cell)
    cell.scheduler.session.run(submit.request_id, 0, token_ids[:2], usage=make_usage(num_cached_tokens=16))
    await until_at_stake(cell)
    await break_session(cell)
    usage = make_usage(len(token_ids), num_cached_tokens=48)
    cell.scheduler.session.run(submit.request_id, 2, token_ids[2:], finish_reason=LENGTH, usage=usage)
    assert (await answering).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_silence_is_a_break(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.5)
    cell.scheduler.is_silent = True
    await eventually(lambda: len(cell.scheduler.sessions) >= 2)


async def test_unended_stop_string_does_not_wait_for_a_lost_scheduler(cell: Cell) -> None:
    cell.scheduler.answers_aborts = False
    token_ids = cell.ids(TEXT)
    answering = asyncio.create_task(cell.complete(stop="fox"))
    submit = await submitted(cell)
    cell.scheduler.session.run(submit.request_id, 0, token_ids)
    await eventually(lambda: len(cell.scheduler.aborts) == 1)
    assert not answering.done()
    await cell.scheduler.stop()
    response = await answering
    assert text_of(response) == "the quick brown "
    # Nobody could tell how many tokens were cached, so nothing is said of it.
    assert response.json()["usage"]["prompt_tokens_details"] is None


async def test_deadline_ends_a_request_while_the_scheduler_is_away(model_folder: Path) -> None:
    async with running_cell(model_folder, request_timeout_seconds=0.2) as cell:
        await cell.scheduler.stop()
        response = await cell.complete()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_tokens_of_an_unknown_request_are_answered_with_one_abort(cell: Cell) -> None:
    session = cell.scheduler.session
    session.run("over", 0, [], finish_reason=LENGTH)
    for first_token_idx in range(3):
        session.run("stray", first_token_idx, [5])
    session.run("other", 0, [5])
    await eventually(lambda: len(cell.scheduler.aborts) >= 2)
    assert [(abort.request_id, abort.HasField("index")) for abort in cell.scheduler.aborts] == [
        ("stray", False),
        ("other", False),
    ]


async def test_tokens_after_an_abort_are_not_answered_with_another(cell: Cell) -> None:
    leaving = asyncio.create_task(cell.complete())
    submit = await submitted(cell)
    leaving.cancel()
    await eventually(lambda: len(cell.scheduler.aborts) == 1)
    cell.scheduler.session.run(submit.request_id, 0, [5])
    cell.scheduler.session.run("stray", 0, [5])
    await eventually(lambda: len(cell.scheduler.aborts) >= 2)
    assert [abort.request_id for abort in cell.scheduler.aborts] == [submit.request_id, "stray"]


async def test_remaining_deadline_is_told(model_folder: Path) -> None:
    async with running_cell(model_folder, request_timeout_seconds=50) as cell:
        cell.answer("ok")
        await cell.complete()
        assert 40_000 < cell.scheduler.submits[0].remaining_deadline_ms <= 50_000


async def test_sequence_that_the_scheduler_aborts_is_an_error(cell: Cell) -> None:
    def abort(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        session.run(submit.request_id, 0, [], finish_reason=common_pb2.FINISH_REASON_ABORT)

    cell.scheduler.on_submit = abort
    assert (await cell.complete()).status_code == 503


async def test_wrong_cluster_token_is_told_once(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_cell(model_folder) as cell:
        await cell.scheduler.stop()
        await cell.scheduler.start(token="secret")
        await eventually(lambda: "cluster token" in caplog.text)
        assert caplog.text.count("cluster token") == 1


async def test_cluster_token_opens_the_session(model_folder: Path) -> None:
    scheduler = FakeScheduler()
    async with running_cell(model_folder, scheduler, cluster_token="secret") as cell:
        await cell.scheduler.stop()
        await cell.scheduler.start(token="secret")
        cell.answer("ok")
        assert text_of(await cell.complete()) == "ok"


async def test_gateway_learns_the_model_when_a_worker_registers(model_folder: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.cell = scheduler_pb2.GetModelResponse()
    async with running_cell(model_folder, scheduler) as cell:
        response = await cell.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert (await cell.http.get("/v1/models")).status_code == 503
        scheduler.cell = make_cell()
        await eventually(lambda: cell.gateway.session.cell is not None)
        cell.answer("ok")
        assert text_of(await cell.complete()) == "ok"
