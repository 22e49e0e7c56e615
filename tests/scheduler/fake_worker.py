"""A worker without a model: it answers steps over real gRPC with tokens that depend on all tokens before them.

A token lost, delivered twice or computed from the wrong prefix changes every token after it, so that a test only has to
compare a stream with `expected_output`. What the step protocol forbids ends up in `mistakes`, which must stay empty.
"""

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from protos import common_pb2, scheduler_pb2, worker_pb2
from protos.block_hash import HASH_BYTES
from protos.channel import CHANNEL_OPTIONS, PROTOCOL_VERSION, Refusals, TokenInterceptor, token_metadata
from protos.credentials import Certificates, Credentials
from protos.scheduler_pb2_grpc import SchedulerStub
from protos.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
EOS_TOKEN_ID = 2  # never chosen by `next_token`
HEARTBEAT_SECONDS = 0.05


def next_token(token_ids: Sequence[int], sequence_idx: int) -> int:
    digest = zlib.crc32(struct.pack(f"<{len(token_ids) + 1}I", sequence_idx, *token_ids))
    return 3 + digest % (VOCAB_SIZE - 3)


def expected_output(prompt: Sequence[int], num_tokens: int, sequence_idx: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, sequence_idx))
    return token_ids[len(prompt) :]


def make_model(**changes: Any) -> common_pb2.ModelInfo:
    fields: dict[str, Any] = {
        "name": "fake",
        "fingerprint": b"f" * 32,
        "max_model_len": 2048,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": [EOS_TOKEN_ID],
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
    }
    return common_pb2.ModelInfo(**(fields | changes))


@dataclass
class _Row:
    seq_epoch: int
    token_ids: list[int]
    entries: list[int]
    num_computed_tokens: int
    num_scheduled_tokens: int
    sequence_idx: int = 0
    wants_logprobs: bool = False


@dataclass
class FakeWorker(WorkerServicer):
    """Call `start`, then `join` (register and send heartbeats) or `register` alone; at last `stop`."""

    instance_id: str = "worker-1"
    num_slabs: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    model: common_pb2.ModelInfo = field(default_factory=make_model)
    token: str = ""
    certificates: Certificates | None = None
    step_ms: float = 1.0
    # What a test changes while the worker runs.
    lane_epoch: int = 0  # of the last Register
    num_refused_calls: dict[str, int] = field(default_factory=dict)  # what it tells the scheduler of itself
    num_results_to_lose: int = 0  # so many times the stream breaks in place of a result, after the step was computed
    fails_next_step: bool = False
    false_seals: list[tuple[int, bytes]] = field(default_factory=list)  # told in a manifest before the true ones
    # What a test reads.
    address: str = ""
    num_streams: int = 0
    num_steps: int = 0
    step_sizes: list[int] = field(default_factory=list)  # rows of each step
    seals: dict[int, bytes] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_step = asyncio.Event()  # clear: steps hang, and the worker lives on
        self.may_step.set()
        self.may_tell_manifest = asyncio.Event()
        self.may_tell_manifest.set()
        self._breaks = asyncio.Event()
        self._current_epoch: int | None = None
        self._last_step_id = 0
        self._results: dict[int, worker_pb2.StepResult] = {}
        self._rows: dict[int, _Row] = {}
        self._must_restart = False
        self._heartbeats: asyncio.Task[None] | None = None
        self._credentials = Credentials(self.token, self.certificates)

    # ---- its life

    async def start(self) -> "FakeWorker":
        self._server = grpc.aio.server(interceptors=[TokenInterceptor(self.token, Refusals())], options=CHANNEL_OPTIONS)
        add_WorkerServicer_to_server(self, self._server)
        port = self._credentials.add_port(self._server, "127.0.0.1:0")
        self.address = self.address or f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def join(self, scheduler_address: str) -> "FakeWorker":
        await self.register(scheduler_address)
        self._heartbeats = asyncio.create_task(self._send_heartbeats(scheduler_address))
        return self

    async def stop(self) -> None:
        self.fall_silent()
        self.may_step.set()
        self.may_tell_manifest.set()
        await self._server.stop(0)

    def fall_silent(self) -> None:
        """Send no more heartbeats."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None

    async def drain(self, scheduler_address: str) -> bool:
        """Say that the worker is about to leave; return whether it may."""
        request = scheduler_pb2.HeartbeatRequest(
            instance_id=self.instance_id, lane_epoch=self.lane_epoch, draining=True
        )
        async with self._credentials.dial(scheduler_address) as channel:
            response = await SchedulerStub(channel).Heartbeat(request, metadata=token_metadata(self.token))
        return bool(response.drained)

    def break_streams(self) -> None:
        """End the step stream that is open."""
        self._breaks.set()
        self._breaks = asyncio.Event()

    async def register(self, scheduler_address: str, **changes: Any) -> None:
        request = self.registration(**changes)
        async with self._credentials.dial(scheduler_address) as channel:
            await SchedulerStub(channel).Register(request, metadata=token_metadata(self.token))

    def registration(self, **changes: Any) -> scheduler_pb2.RegisterRequest:
        """Return what the worker says of itself as it begins a new epoch."""
        self.lane_epoch += 1
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "address": self.address,
            "instance_id": self.instance_id,
            "lane_epoch": self.lane_epoch,
            "model": self.model,
            "num_slabs": self.num_slabs,
            "slab_bytes": 4096,
            "native_blocks_per_slab": 16,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        return scheduler_pb2.RegisterRequest(**(fields | changes))

    async def _send_heartbeats(self, scheduler_address: str) -> None:
        async with self._credentials.dial(scheduler_address) as channel:
            while True:
                request = scheduler_pb2.HeartbeatRequest(
                    instance_id=self.instance_id,
                    lane_epoch=self.lane_epoch,
                    num_refused_calls_total=self.num_refused_calls,
                )
                try:
                    response = await SchedulerStub(channel).Heartbeat(request, metadata=token_metadata(self.token))
                    if not response.known:
                        await self.register(scheduler_address)
                except grpc.aio.AioRpcError:
                    pass  # the scheduler is gone for now, as a real worker finds too: it goes on asking
                await asyncio.sleep(HEARTBEAT_SECONDS)

    # ---- its service

    async def Health(self, request: Any, context: Any) -> worker_pb2.HealthResponse:  # noqa: N802
        return worker_pb2.HealthResponse(instance_id=self.instance_id, lane_epoch=self.lane_epoch)

    async def Manifest(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.ManifestPart]:  # noqa: N802
        if (request.instance_id, request.lane_epoch) != (self.instance_id, self.lane_epoch):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not my epoch")
        self._current_epoch, self._last_step_id = request.lane_epoch, 0
        self._results.clear()
        self._rows.clear()
        self._must_restart = False
        await self.may_tell_manifest.wait()
        for entry, block_hash in [*self.false_seals, *self.seals.items()]:
            seals = worker_pb2.Seals(entries=[entry], block_hashes=block_hash, recipe_versions=[0])
            yield worker_pb2.ManifestPart(seals=seals)

    async def Steps(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepResult]:  # noqa: N802
        self.num_streams += 1
        breaks = asyncio.create_task(self._breaks.wait())
        try:
            async for request in request_iterator:
                may_step = asyncio.create_task(self.may_step.wait())
                await asyncio.wait((may_step, breaks), return_when=asyncio.FIRST_COMPLETED)
                may_step.cancel()
                result = None if breaks.done() else self.answer(request)
                if breaks.done() or self.num_results_to_lose:
                    self.num_results_to_lose -= not breaks.done()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
                if result is not None:
                    yield result
                else:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a stale epoch or a gap")
        finally:
            breaks.cancel()

    def answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult | None:
        """Return a step's result, the kept one if it ran before; None: it is refused."""
        if request.lane_epoch != self._current_epoch or request.step_id > self._last_step_id + 1:
            return None
        if request.step_id not in self._results:
            self._check(request.step_id == self._last_step_id + 1, f"step {request.step_id} again")
            self._last_step_id = request.step_id
            self._results[request.step_id] = self._compute(request)
            self._results.pop(request.step_id - 4, None)
        return self._results[request.step_id]

    def _compute(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        self.num_steps += 1
        result = worker_pb2.StepResult(lane_epoch=request.lane_epoch, step_id=request.step_id, step_ms=self.step_ms)
        if request.restart:
            self._rows.clear()
            self._must_restart = False
        if self._must_restart:
            result.status = worker_pb2.STEP_STATUS_SKIPPED
            return result
        scheduled = self._mirror(request)
        if not scheduled:
            result.step_ms = 0.0
        if self.fails_next_step:
            self.fails_next_step, self._must_restart = False, True
            result.status, result.error = worker_pb2.STEP_STATUS_FAILED, "asked to fail"
            return result
        result.status = worker_pb2.STEP_STATUS_OK
        self.step_sizes.append(len(scheduled))
        for seq_id in scheduled:
            row = self._rows[seq_id]
            row.num_computed_tokens += row.num_scheduled_tokens
            num_slots = len(row.entries) * self.model.block_size
            self._check(row.num_computed_tokens <= num_slots, f"row {seq_id} outgrows its table")
            self._check(row.num_computed_tokens <= len(row.token_ids), f"row {seq_id} outruns its tokens")
            if row.num_computed_tokens == len(row.token_ids):
                self._sample(seq_id, row, result.sampled)
        return result

    def _sample(self, seq_id: int, row: _Row, sampled: worker_pb2.SampledRows) -> None:
        token_id = next_token(row.token_ids, row.sequence_idx)
        row.token_ids.append(token_id)
        sampled.seq_ids.append(seq_id)
        sampled.seq_epochs.append(row.seq_epoch)
        sampled.token_ids.append(token_id)
        sampled.logprobs.append(-0.5)
        if row.wants_logprobs:
            tokens = [common_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[token_id], top_logprobs=[-0.5])]
            sampled.row_logprobs.add(seq_id=seq_id, tokens=tokens)

    def _mirror(self, request: worker_pb2.StepRequest) -> list[int]:
        """Apply a request's parts in the order of its fields; return the rows to run."""
        for seq_id in request.finished_seq_ids:
            self._check(self._rows.pop(seq_id, None) is not None, f"finished row {seq_id} is unknown")
        for resumed in request.resumed_rows:
            row = self._rows[resumed.seq_id]
            del row.token_ids[resumed.num_tokens :]
            row.seq_epoch, row.entries = resumed.seq_epoch, list(resumed.entries)
            row.num_computed_tokens = resumed.num_computed_tokens
            row.num_scheduled_tokens = resumed.num_scheduled_tokens
        for new in request.new_rows:
            self._check(new.seq_id not in self._rows, f"new row {new.seq_id} is known")
            self._rows[new.seq_id] = _Row(
                new.seq_epoch,
                list(new.token_ids),
                list(new.entries),
                new.num_computed_tokens,
                new.num_scheduled_tokens,
                new.sequence_idx,
                new.sampling.HasField("num_logprobs") and new.sampling.num_logprobs > 0,
            )
        patches = request.patches
        for seq_id, block_idx, entry in zip(patches.seq_ids, patches.block_idxs, patches.entries, strict=True):
            self._rows[seq_id].entries[block_idx] = entry
        self._continue_rows(request.continued)
        hashes = request.seals.block_hashes
        for idx, entry in enumerate(request.seals.entries):
            self.seals[entry] = hashes[idx * HASH_BYTES : (idx + 1) * HASH_BYTES]
        scheduled = [*(row.seq_id for row in request.resumed_rows), *(row.seq_id for row in request.new_rows)]
        scheduled += request.continued.seq_ids
        self._unseal([*request.ops.zero_entries, *request.ops.copy_dst_entries])
        for seq_id in scheduled:
            row = self._rows[seq_id]
            first = row.num_computed_tokens // self.model.block_size
            last = (row.num_computed_tokens + row.num_scheduled_tokens - 1) // self.model.block_size
            self._unseal(row.entries[first : last + 1])
        return scheduled

    def _continue_rows(self, continued: worker_pb2.ContinuedRows) -> None:
        num_rows = len(continued.seq_ids)
        nums_scheduled = list(continued.num_scheduled_tokens) or [1] * num_rows
        nums_new_entries = list(continued.num_new_entries) or [0] * num_rows
        new_entries = iter(continued.new_entries)
        for seq_id, num_scheduled, num_new in zip(continued.seq_ids, nums_scheduled, nums_new_entries, strict=True):
            row = self._rows[seq_id]
            row.num_scheduled_tokens = num_scheduled
            row.entries += [next(new_entries) for _ in range(num_new)]

    def _unseal(self, entries: Iterable[int]) -> None:
        for entry in entries:
            self.seals.pop(entry, None)

    def _check(self, is_right: bool, mistake: str) -> None:
        if not is_right:
            self.mistakes.append(mistake)
