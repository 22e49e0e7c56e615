"""`python -m gateway` as a process: how it starts, how it refuses to, and how it stops."""

import asyncio
import contextlib
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway.__main__ import main
from protos import common_pb2
from tests.gateway.fakes import FakeScheduler, eventually, make_byte_level_tokenizer, make_usage, until_ready


@contextlib.asynccontextmanager
async def gateway_process(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway", *arguments, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def serving_gateway(model_folder: Path) -> AsyncIterator[tuple[Process, str, FakeScheduler]]:
    """A gateway that serves, its URL, and its scheduler."""
    scheduler = FakeScheduler()
    await scheduler.start()
    arguments = ["--model", str(model_folder), "--port", "0", "--scheduler", scheduler.address]
    async with gateway_process(*arguments) as process:
        found = re.search(r"ready on (http://\S+)", await line_with(process, "ready on"))
        assert found is not None
        async with httpx.AsyncClient(base_url=found.group(1), timeout=30) as http:
            await until_ready(http)
        yield process, found.group(1), scheduler
    await scheduler.stop()


async def line_with(process: Process, words: str) -> str:
    """The next line of the log that has these words."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if words in line:
                return line
    raise AssertionError(f"the log has no {words!r}")


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a gateway says that does not start."""
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments])
    assert main() == 1
    return capsys.readouterr().err


def test_mistakes_at_the_start_are_one_line(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, words in (
            (["--model", "/nothing"], "--model /nothing: no such folder"),
            (["--model", str(model_folder), "--port", str(port)], f"cannot listen on 127.0.0.1 port {port}"),
            (["--port", "many"], "--port: "),
            (["--request-timeout-seconds", "inf"], "--request-timeout-seconds: "),
            (["--log-level", "loud"], "--log-level: loud is none of"),
            (["--colour", "red"], "--colour"),
        ):
            message = refusal(monkeypatch, capsys, *arguments)
            assert words in message
            assert message.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_and_exits_with_0(model_folder: Path, number: signal.Signals) -> None:
    token_ids = make_byte_level_tokenizer().encode("the quick fox").ids
    async with serving_gateway(model_folder) as (process, url, scheduler):
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            streaming = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hello", "stream": True}))
            await eventually(lambda: bool(scheduler.submits))
            request_id = scheduler.submits[0].request_id
            scheduler.session.run(request_id, 0, token_ids[:1])
            process.send_signal(number)
            await line_with(process, "draining")
            response = await http.post("/v1/completions", json={"prompt": "hello"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")
            assert (await http.get("/health")).status_code == 200
            reason = common_pb2.FINISH_REASON_LENGTH
            scheduler.session.run(request_id, 1, token_ids[1:], finish_reason=reason, usage=make_usage())
            assert (await streaming).text.endswith("data: [DONE]\n\n")
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_answer_that_a_slow_client_still_reads_is_not_cut_by_a_drain(model_folder: Path) -> None:
    token_ids = make_byte_level_tokenizer().encode("the quick fox").ids * 300_000
    async with serving_gateway(model_folder) as (process, url, scheduler):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            body = b'{"prompt": "hello"}'
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await eventually(lambda: bool(scheduler.submits))
            request_id, reason = scheduler.submits[0].request_id, common_pb2.FINISH_REASON_LENGTH
            scheduler.session.run(request_id, 0, token_ids, finish_reason=reason, usage=make_usage())
            head = await asyncio.to_thread(slow.recv, 1024)
            process.send_signal(signal.SIGTERM)
            await line_with(process, "draining")
            await asyncio.sleep(3)  # longer than the last words of a drain that failed
            answer = await asyncio.to_thread(slow.makefile("rb").read)
        expected = re.search(rb"content-length: (\d+)", head)
        assert expected is not None
        assert len((head + answer).partition(b"\r\n\r\n")[2]) == int(expected.group(1)) > 3_000_000
        async with asyncio.timeout(30):
            assert await process.wait() == 0


async def test_request_without_an_end_of_its_head_is_refused(model_folder: Path) -> None:
    async with gateway_process("--model", str(model_folder), "--port", "0") as process:
        found = re.search(r"ready on http://127\.0\.0\.1:(\d+)", await line_with(process, "ready on"))
        assert found is not None
        port = int(found.group(1))
        for begin in (b"GET / HTTP/1.1\r\nX: ", b"GET /"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(begin)
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                for _ in range(200):  # beyond what connections buffer
                    writer.write(b"a" * 65536)
                    await writer.drain()
                pytest.fail("it reads without end")
        # A long body behind a short head is no long head, on a connection that goes on.
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            for _ in range(3):
                assert (await http.post("/v1/completions", json={"prompt": "a" * 1_000_000})).status_code == 503


async def test_second_signal_ends_a_stream_that_does_not(model_folder: Path) -> None:
    async with (
        serving_gateway(model_folder) as (process, url, scheduler),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        waiting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hello"}))
        await eventually(lambda: bool(scheduler.submits))
        process.send_signal(signal.SIGTERM)
        await line_with(process, "draining")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await asyncio.gather(waiting, return_exceptions=True)
