"""The scheduler as a process and its end: figures, watches, drain, exit codes."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import common_pb2, scheduler_pb2
from protos.channel import MissingTokenError
from protos.scheduler_pb2_grpc import SchedulerStub
from protos.settings import read_settings
from scheduler_svc.__main__ import main
from scheduler_svc.core.types import FairnessPolicy
from scheduler_svc.server import CannotListenError, SchedulerServer
from scheduler_svc.settings import SchedulerSettings

from .conftest import TIMING, LoopbackCell, until
from .fake_gateway import FakeGateway
from .fake_worker import FakeWorker, expected_output

PROMPT = list(range(10, 30))
ROOT = Path(__file__).resolve().parents[2]


async def test_stats_count_what_was_done(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker(step_ms=7.0)
    gateway = await cell.add_gateway()
    for request_id in ("a", "b"):
        await gateway.submit(request_id, PROMPT, max_tokens=10)
        await until(lambda request_id=request_id: gateway.output(request_id).has_ended)  # type: ignore[misc]
    async with grpc.aio.insecure_channel(cell.address) as channel:
        stats = await SchedulerStub(channel).GetStats(scheduler_pb2.GetStatsRequest())
    assert (stats.num_waiting_seqs, stats.num_running_seqs) == (0, 0)
    assert stats.num_output_tokens_total == 20
    assert stats.prefix_cache_queries_total == 40
    assert stats.prefix_cache_hits_total == 16
    assert stats.num_prompt_tokens_total == 24
    assert stats.num_steps_total >= 20
    assert not stats.draining
    (lane,) = stats.lanes
    assert (lane.instance_id, lane.address) == (worker.instance_id, worker.address)
    assert lane.last_step_ms == 7.0
    assert lane.num_blocks == 64 * 16


async def test_tenants_limits_reach_the_core(cell: LoopbackCell) -> None:
    await cell.start(tenant_max_running=1)
    await cell.add_worker()
    gateway = await cell.add_gateway()
    for request_id, tenant in (("1", "a"), ("2", "a"), ("3", "b")):
        await gateway.submit(request_id, PROMPT, max_tokens=300, tenant=tenant)
    await until(lambda: bool(gateway.output("1").token_ids and gateway.output("3").token_ids))
    await until(lambda: bool(gateway.output("2").token_ids))
    assert gateway.output("1").has_ended


async def test_watch_sends_figures_until_the_end(cell: LoopbackCell) -> None:
    await cell.start()
    async with grpc.aio.insecure_channel(cell.address) as channel:
        watch = SchedulerStub(channel).Watch(scheduler_pb2.WatchRequest(interval_ms=10))
        uptimes = []
        async for stats in watch:
            uptimes.append(stats.uptime_ms)
            if len(uptimes) == 3:
                break
        assert uptimes == sorted(uptimes)
        await cell.server.stop()
        assert await watch.code() == grpc.StatusCode.OK


async def test_drain_finishes_what_runs_and_refuses_what_is_new(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("running", PROMPT, max_tokens=100)
    await until(lambda: len(gateway.output("running").token_ids) > 3)
    worker.may_step.clear()
    drained = asyncio.create_task(cell.server.drain())
    await until(lambda: cell.server.hub.is_draining)
    await gateway.submit("new", PROMPT, max_tokens=5)
    await until(lambda: gateway.output("new").has_ended)
    assert gateway.output("new").error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert not drained.done()
    worker.may_step.set()
    await drained
    await until(lambda: gateway.output("running").has_ended)
    assert gateway.output("running").token_ids == expected_output(PROMPT, 100)


async def test_drain_takes_back_a_running_request_after_a_break(cell: LoopbackCell) -> None:
    await cell.start()
    await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=100)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    drained = asyncio.create_task(cell.server.drain())
    await gateway.connect(["a"])
    await gateway.submit("a", PROMPT, max_tokens=100)
    await drained
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 100)


async def test_drain_ends_what_cannot_finish(cell: LoopbackCell) -> None:
    await cell.start(scheduler_drain_seconds=0.05)
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    worker.may_step.clear()
    await gateway.submit("a", PROMPT, max_tokens=100)
    await until(lambda: cell.num_seqs == 1)
    await cell.server.drain()
    assert cell.server.hub.is_idle, "its end has been sent"
    await cell.server.stop()
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_drain_waits_for_a_worker_that_comes_back(cell: LoopbackCell) -> None:
    await cell.start()
    worker = await cell.add_worker()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=100)
    await until(lambda: len(gateway.output("a").token_ids) > 3)
    drained = asyncio.create_task(cell.server.drain())
    await worker.stop()
    await until(lambda: not cell.server.registry.lanes)
    await asyncio.sleep(20 * TIMING.tick_ms / 1000)
    assert not gateway.output("a").has_ended
    await cell.add_worker()
    await drained
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").token_ids == expected_output(PROMPT, 100)


async def test_drain_does_not_wait_for_workers_that_are_gone(cell: LoopbackCell) -> None:
    await cell.start()
    gateway = await cell.add_gateway()
    await gateway.submit("a", PROMPT, max_tokens=100)
    await until(lambda: cell.server.figures().num_waiting_seqs == 1)
    await asyncio.wait_for(cell.server.drain(), 10)
    await until(lambda: gateway.output("a").has_ended)
    assert gateway.output("a").error.code == common_pb2.ERROR_CODE_UNAVAILABLE


async def test_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = SchedulerServer(SchedulerSettings(scheduler_port=port))
        with pytest.raises(CannotListenError, match=str(port)):
            await server.start()
        await server.stop()


async def test_listening_beyond_this_machine_needs_a_token() -> None:
    with pytest.raises(MissingTokenError):
        SchedulerServer(SchedulerSettings(host="0.0.0.0"))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--scheduler-port", "x"], "--scheduler-port"),
        (["--log-level", "loud"], "--log-level"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--host", "0.0.0.0"], "--host"),
        (["--redis-url", "cache:6379"], "--redis-url"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype: 'int3' is not a KV cache dtype"),
        (["--kv-precision-policy", "int8,native"], "--kv-precision-policy: the precision policy 'int8,native' makes"),
        (["--kv-precision-floor", "int3"], "--kv-precision-floor: 'int3' is not a KV format"),
        (["--kv-precision-policy", "native:1,int8", "--kv-cache-dtype", "int4"], "--kv-precision-policy"),
        (
            ["--kv-cache-dtype", "int4", "--kv-precision-floor", "int8"],
            "--kv-precision-floor: the precision floor int8 is wider",
        ),
        (["--tenant-weights", "a=2,b"], "--tenant-weights: 'b' is not NAME=WEIGHT"),
        (["--tenant-weights", "a=0"], "--tenant-weights: 'a=0' is not NAME=WEIGHT"),
        (["--tenant-weights", "a=nan"], "--tenant-weights: 'a=nan' is not NAME=WEIGHT"),
        (["--tenant-weights", "a=1,a=2"], "--tenant-weights: 'a' is there twice"),
        (["--tenant-max-running", "0"], "--tenant-max-running"),
        (["--tenant-max-kv-share", "1.5"], "--tenant-max-kv-share"),
        (["--tenant-max-kv-share", "0"], "--tenant-max-kv-share"),
    ],
)
def test_mistake_is_one_line_that_names_the_flag(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 1
    line = capsys.readouterr().err
    assert named in line
    assert line.count("\n") == 1


def test_flags_say_what_tenants_are_entitled_to() -> None:
    args = ["--tenant-weights", "a=2, b@c=0.5", "--tenant-max-running", "3", "--tenant-max-kv-share", "0.25"]
    settings = read_settings(SchedulerSettings, args)
    assert settings.fairness() == FairnessPolicy({"a": 2.0, "b@c": 0.5}, 3, 0.25)
    assert SchedulerSettings().fairness() == FairnessPolicy({}, None, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process_drains_and_exits_with_0(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler_svc", "--scheduler-port", "0"), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    ready = await asyncio.wait_for(process.stderr.readline(), 30)
    address = ready.decode().rpartition("ready on ")[2].strip()
    worker = await FakeWorker().start()
    gateway = FakeGateway(address)
    try:
        await worker.join(address)
        await gateway.connect()
        await gateway.submit("a", PROMPT, max_tokens=200)
        await until(lambda: len(gateway.output("a").token_ids) > 3)
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 30)
        await until(lambda: gateway.output("a").has_ended)
    finally:
        if process.returncode is None:
            process.kill()
        log = (await process.communicate())[1].decode()
        await gateway.close()
        await worker.stop()
    assert process.returncode == 0, log
    assert gateway.output("a").token_ids == expected_output(PROMPT, 200)
    assert gateway.mistakes == worker.mistakes == []
