"""A gateway without HTTP: it opens sessions, submits, and keeps what it is sent as a real one would."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, scheduler_pb2
from protos.channel import token_metadata
from protos.scheduler_pb2_grpc import SchedulerStub

SIGN_OF_LIFE_SECONDS = 0.05


@dataclass
class Output:
    """What has come of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    terminal_runs: list[scheduler_pb2.TokenRun] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.terminal_runs)

    @property
    def finish_reason(self) -> int:
        assert len(self.terminal_runs) == 1, self.terminal_runs
        return self.terminal_runs[0].finish_reason

    @property
    def error(self) -> common_pb2.Error:
        assert self.finish_reason == common_pb2.FINISH_REASON_ERROR, self.terminal_runs
        return self.terminal_runs[0].error


class FakeGateway:
    """`connect` opens a session, `drop` breaks it; `submit` again after a new session re-attaches."""

    def __init__(self, address: str, gateway_id: str = "gateway-1", token: str = "") -> None:
        self.gateway_id = gateway_id
        self.outputs: dict[tuple[str, int], Output] = {}
        self.num_messages = 0
        self.num_empty_messages = 0
        self.num_token_messages = 0
        self.num_gaps = 0
        self.mistakes: list[str] = []
        self._submitted_ids: set[str] = set()
        self.session_number = 0
        self.ended: asyncio.Future[grpc.StatusCode] = asyncio.get_running_loop().create_future()
        self._token = token
        self._channel = grpc.aio.insecure_channel(address)
        self._stream: Any = None
        self._sending = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._signs_of_life: asyncio.Task[None] | None = None

    async def connect(
        self, request_ids: Sequence[str] = (), *, session_number: int | None = None, sends_signs_of_life: bool = True
    ) -> "FakeGateway":
        if self._signs_of_life is not None:
            self._signs_of_life.cancel()
        self.session_number = session_number if session_number is not None else self.session_number + 1
        self.ended = asyncio.get_running_loop().create_future()
        self._stream = SchedulerStub(self._channel).Session(metadata=token_metadata(self._token))
        hello = scheduler_pb2.Hello(
            gateway_id=self.gateway_id, session_number=self.session_number, request_ids=request_ids
        )
        await self._send(scheduler_pb2.ClientMessage(hello=hello))
        self._tasks.append(asyncio.create_task(self._read(self._stream, self.ended)))
        if sends_signs_of_life:
            self._signs_of_life = asyncio.create_task(self._live())
            self._tasks.append(self._signs_of_life)
        return self

    def drop(self) -> None:
        """Break the session."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._stream.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks)
        if self._stream is not None:
            self.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close()

    def output(self, request_id: str, index: int = 0) -> Output:
        return self.outputs.setdefault((request_id, index), Output())

    async def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        n: int = 1,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Submit a request, or submit it again with what has been delivered."""
        delivered = [
            scheduler_pb2.Delivered(
                index=index,
                token_ids=output.token_ids,
                finish_reason=output.terminal_runs[0].finish_reason if output.has_ended else 0,  # type: ignore[arg-type]
            )
            for index in range(n)
            if (output := self.output(request_id, index)).token_ids or output.has_ended
        ]
        submit = scheduler_pb2.Submit(
            request_id=request_id,
            token_ids=prompt,
            sampling=common_pb2.SamplingParams(
                top_p=1, repetition_penalty=1, max_tokens=max_tokens, **(sampling or {})
            ),
            n=n,
            delivered=delivered,
            **({"is_resubmit": request_id in self._submitted_ids} | fields),
        )
        self._submitted_ids.add(request_id)
        await self._send(scheduler_pb2.ClientMessage(submit=submit))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        abort = scheduler_pb2.Abort(request_id=request_id, index=index)
        await self._send(scheduler_pb2.ClientMessage(abort=abort))

    async def say_hello_again(self) -> None:
        """Break the protocol."""
        hello = scheduler_pb2.Hello(gateway_id=self.gateway_id, session_number=self.session_number + 1)
        await self._send(scheduler_pb2.ClientMessage(hello=hello))

    async def _send(self, message: scheduler_pb2.ClientMessage) -> None:
        async with self._sending:  # a stream takes one write at a time
            await self._stream.write(message)

    async def _live(self) -> None:
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_SECONDS)
            await self._send(scheduler_pb2.ClientMessage())

    async def _read(self, stream: Any, ended: asyncio.Future[grpc.StatusCode]) -> None:
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self.num_messages += 1
                self.num_empty_messages += not message.runs
                self.num_token_messages += any(run.token_ids for run in message.runs)
                for run in message.runs:
                    self._keep(run)
        except grpc.aio.AioRpcError:
            pass  # its status is what `ended` tells
        if not ended.done():
            ended.set_result(await stream.code())

    def _keep(self, run: scheduler_pb2.TokenRun) -> None:
        output = self.output(run.request_id, run.index)
        num_known = len(output.token_ids) - run.first_token_idx
        if num_known < 0:
            self.num_gaps += 1
            return
        if list(run.token_ids[:num_known]) != output.token_ids[run.first_token_idx :][: len(run.token_ids)]:
            self.mistakes.append(f"{run.request_id}: a replay differs from what came before")
        output.token_ids += run.token_ids[num_known:]
        output.logprobs += run.logprobs[num_known:]
        if run.finish_reason:
            output.terminal_runs.append(run)
            if len(output.terminal_runs) > 1:
                self.mistakes.append(f"{run.request_id}: a second terminal run of index {run.index}")
