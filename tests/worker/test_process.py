"""A worker process with a tiny model: it registers, is adopted, steps as `transformers` does, and ends in order."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
import torch

from protos import worker_pb2 as pb
from protos.channel import CHANNEL_OPTIONS, PROTOCOL_VERSION, token_metadata
from protos.scheduler_pb2 import RegisterRequest
from protos.worker_pb2_grpc import WorkerStub
from tests.worker.fakes import new_row, tokens_of
from tests.worker.models.checkpoints import VOCAB_SIZE, Saved, save
from tests.worker.test_registration import TOKEN, soon, start_scheduler
from tests.worker.test_service import read

if TYPE_CHECKING:
    from protos.worker_pb2_grpc import WorkerAsyncStub

BLOCK_SIZE = 16
METADATA = token_metadata(TOKEN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("llama-tied", tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def worker_process(model: Path | str, *flags: str) -> AsyncIterator[Process]:
    """Run a worker for as long as the block lasts."""
    command = ("-m", "worker_svc", "--model", str(model), "--dtype", "float32", "--cluster-token", TOKEN, *flags)
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def wait_for_line(process: Process, pattern: str) -> re.Match[str]:
    assert process.stderr is not None
    lines = []
    while line := (await process.stderr.readline()).decode():
        lines.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no line matches {pattern!r} in {''.join(lines)}")


async def greedy(stub: "WorkerAsyncStub", registered: RegisterRequest, prompt: list[int], count: int) -> list[int]:
    """Step one row: the prompt in chunks of 7 tokens, then decodes, two steps in flight."""
    places = registered.native_blocks_per_slab
    entries = [(idx // places * 256 + idx % places) << 3 for idx in range(-(-(len(prompt) + count) // BLOCK_SIZE))]
    row = new_row(1, prompt, entries, num_scheduled=7)
    requests = [pb.StepRequest(new_rows=[row])]
    for begin in range(7, len(prompt), 7):
        chunk = min(7, len(prompt) - begin)
        requests.append(pb.StepRequest(continued=pb.ContinuedRows(seq_ids=[1], num_scheduled_tokens=[chunk])))
    requests += [pb.StepRequest(continued=pb.ContinuedRows(seq_ids=[1])) for _ in range(count - 1)]
    stream = stub.Steps(metadata=METADATA)
    results: list[pb.StepResult] = []
    for step_id, request in enumerate(requests, start=1):
        request.step_id, request.lane_epoch = step_id, registered.lane_epoch
        await stream.write(request)
        if step_id > 1:
            results.append(await read(stream))
    results.append(await read(stream))
    assert all(result.status == pb.STEP_STATUS_OK for result in results)
    return [tokens_of(result)[1] for result in results if result.sampled.seq_ids]


async def test_worker_registers_steps_like_transformers_and_stops_on_sigterm(saved: Saved) -> None:
    scheduler, server, port = await start_scheduler()
    flags = ("--scheduler", f"127.0.0.1:{port}", "--kv-cache-memory", "1MiB", "--max-num-seqs", "3")
    async with worker_process(saved.folder, *flags) as process:
        address = (await wait_for_line(process, r"ready on (\S+)")).group(1)
        registered = await soon(scheduler.registered)
        assert registered.address == address
        assert registered.protocol_version == PROTOCOL_VERSION
        assert (registered.max_num_seqs, registered.max_num_batched_tokens) == (3, 256)
        assert len(registered.model.fingerprint) == 32
        assert (registered.model.vocab_size, registered.model.max_model_len) == (VOCAB_SIZE, 256)
        assert registered.num_slabs * registered.slab_bytes * 3 <= 1024**2  # of three layers
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = WorkerStub(channel)
            health = await stub.Health(pb.HealthRequest(), metadata=METADATA)
            assert (health.instance_id, health.lane_epoch) == (registered.instance_id, registered.lane_epoch)
            adopt = pb.ManifestRequest(instance_id=health.instance_id, lane_epoch=health.lane_epoch)
            assert [part async for part in stub.Manifest(adopt, metadata=METADATA)] == []
            prompt = torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
            tokens = await greedy(stub, registered, prompt, 30)
        expected = saved.expected_logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert expected.argmax(dim=1).tolist() == tokens
        await soon(scheduler.heartbeats)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    await server.stop(0)


async def test_sigterm_while_loading_is_an_orderly_end(saved: Saved) -> None:
    async with worker_process(saved.folder, "--kv-cache-memory", "1MiB") as process:
        await wait_for_line(process, "loading")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


HUNG_WORKER = """
import sys, threading
from types import SimpleNamespace
from kernels.formats import Format
from protos.common_pb2 import ModelInfo
from worker_svc import __main__, assembly, fence

fence.DEVICE_PATIENCE_S = 0.05
runner = SimpleNamespace(forget_rows=threading.Event().wait)
layout = SimpleNamespace(slab_bytes=1, slab_blocks=1)
plan = SimpleNamespace(num_slabs=1, layout=layout)
places = dict.fromkeys(Format, 1)
assembly.load_worker = lambda settings: assembly.LoadedWorker(
    runner, plan, places, ModelInfo(), 1, 1
)
sys.exit(__main__.main(["--num-threads", "1"]))
"""


LOADING_WORKER = """
import sys, threading
from worker_svc import __main__, assembly
from worker_svc.errors import StartupError

def load_worker(settings):
    raise StartupError(f"this is {threading.current_thread().name}")

assembly.load_worker = load_worker
sys.exit(__main__.main([]))
"""


async def test_thread_that_runs_steps_loads_the_model() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LOADING_WORKER, stderr=PIPE)
    await wait_for_line(process, "ERROR.*this is device")
    assert await process.wait() == 1


async def test_hung_device_ends_the_process() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HUNG_WORKER, stderr=PIPE)
    try:
        await wait_for_line(process, "ERROR.*the device has not finished its work within 0.05 s")
        async with asyncio.timeout(30):
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("/no/such/folder", (), r"/no/such/folder"),
        (None, ("--kv-cache-memory", "900TiB"), r"needs [\d,]+ bytes, and [\d,]+ bytes are free"),
        (None, ("--kv-cache-memory", "10KiB"), r"needs [\d,]+ bytes, and 10,240 bytes are free"),
        (None, ("--max-model-len", "257"), "256 tokens"),
    ],
)
async def test_start_that_fails_says_why_in_one_line(
    saved: Saved, model: str | None, flags: tuple[str, ...], words: str
) -> None:
    async with worker_process(model or saved.folder, *flags) as process:
        await wait_for_line(process, f"ERROR.*{words}")
        assert process.stderr is not None
        assert await process.stderr.read() == b""
        assert await process.wait() == 1
