"""A scripted scheduler on a real gRPC port, a tiny tokenizer, and a gateway on a real HTTP port."""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.answering import Gateway
from gateway.server import Server, listen, url_of
from gateway.settings import GatewaySettings
from protos import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from protos.channel import CHANNEL_OPTIONS, Refusals, TokenInterceptor

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 256
VOCAB_SIZE = 512  # of the model: larger than the tokenizer's, as real ones are
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, this is an answer", "what is it? it is good"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@functools.cache
def make_byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE over a few words, with two special tokens and one added word that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("日本")])
    return tokenizer


def make_model_folder(folder: Path, template: str | None = TEMPLATE, added_token: str | None = None) -> Path:
    """Write what a gateway reads of a model; a token may be added as the last one of the vocabulary."""
    tokenizer = Tokenizer.from_str(make_byte_level_tokenizer().to_str())
    tokenizer.add_tokens([added_token] if added_token else [])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>", "bos_token": {"content": "<|start|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_cell(**changes: Any) -> scheduler_pb2.GetModelResponse:
    """What the scheduler says of its cell."""
    model = common_pb2.ModelInfo(
        name=MODEL_NAME, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=[1], block_size=16
    )
    fields: dict[str, Any] = {
        "model": model,
        "max_num_seqs": 8,
        "kv_capacity_tokens": 4096,
        "max_queued_requests": 16,
    } | changes
    return scheduler_pb2.GetModelResponse(**fields)


def make_usage(num_output_tokens: int = 0, num_cached_tokens: int = 0) -> scheduler_pb2.Usage:
    return scheduler_pb2.Usage(num_output_tokens=num_output_tokens, num_cached_tokens=num_cached_tokens)


async def until_ready(http: httpx.AsyncClient) -> None:
    """Return as soon as the gateway says that it can serve."""
    async with asyncio.timeout(30):
        while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 (another process has no events)
            await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return as soon as `condition` holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what changes has no event)
            await asyncio.sleep(0.005)


@dataclass
class FakeSession:
    """One session that a gateway has opened, with all that it said."""

    hello: scheduler_pb2.Hello
    submits: list[scheduler_pb2.Submit] = field(default_factory=list)
    aborts: list[scheduler_pb2.Abort] = field(default_factory=list)
    num_signs_of_life: int = 0
    outbox: asyncio.Queue[scheduler_pb2.ServerMessage | None] = field(default_factory=asyncio.Queue)

    def run(self, request_id: str, first_token_idx: int, token_ids: list[int], **fields: Any) -> None:
        """Send one run in a message of its own."""
        run = scheduler_pb2.TokenRun(
            request_id=request_id, first_token_idx=first_token_idx, token_ids=token_ids, **fields
        )
        self.outbox.put_nowait(scheduler_pb2.ServerMessage(runs=[run]))

    def close(self) -> None:
        """End the session from the scheduler's side."""
        self.outbox.put_nowait(None)


OnSubmit = Callable[[FakeSession, scheduler_pb2.Submit], None]


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Does what `on_submit` says with each request; by default it leaves them waiting."""

    def __init__(self) -> None:
        self.cell = make_cell()
        self.stats = scheduler_pb2.CellStats(lanes=[scheduler_pb2.LaneStats(num_blocks=10, num_free_blocks=10)])
        self.sessions: list[FakeSession] = []
        self.on_submit: OnSubmit = lambda _session, _submit: None
        self.answers_aborts = True
        self.is_silent = False
        self.address = "127.0.0.1:0"
        self._server: grpc.aio.Server | None = None

    @property
    def session(self) -> FakeSession:
        """The newest session."""
        return self.sessions[-1]

    @property
    def submits(self) -> list[scheduler_pb2.Submit]:
        """Every Submit of every session."""
        return [submit for session in self.sessions for submit in session.submits]

    @property
    def aborts(self) -> list[scheduler_pb2.Abort]:
        """Every Abort of every session."""
        return [abort for session in self.sessions for abort in session.aborts]

    async def start(self, token: str = "") -> None:
        """Listen; after a stop, on the same port again."""
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS, interceptors=[TokenInterceptor(token, Refusals())])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Break every connection, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.ServerMessage]:  # noqa: N802
        first = await anext(request_iterator)
        assert first.HasField("hello")
        session = FakeSession(first.hello)
        self.sessions.append(session)
        reading = asyncio.create_task(self._read(session, request_iterator))
        try:
            if not self.is_silent:
                yield scheduler_pb2.ServerMessage()
            while True:
                try:
                    async with asyncio.timeout(0.5):
                        message = await session.outbox.get()
                except TimeoutError:
                    if self.is_silent:
                        continue
                    message = scheduler_pb2.ServerMessage()
                if message is None:
                    return
                yield message
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, session: FakeSession, messages: Any) -> None:
        async for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "submit":
                session.submits.append(message.submit)
                self.on_submit(session, message.submit)
            elif kind == "abort":
                session.aborts.append(message.abort)
                if self.answers_aborts and message.abort.HasField("index"):
                    self._end_aborted(session, message.abort)
            else:
                session.num_signs_of_life += 1

    def _end_aborted(self, session: FakeSession, abort: scheduler_pb2.Abort) -> None:
        usage = make_usage(num_cached_tokens=16)
        session.run(
            abort.request_id, 0, [], index=abort.index, finish_reason=common_pb2.FINISH_REASON_ABORT, usage=usage
        )

    async def GetModel(self, request: Any, context: Any) -> scheduler_pb2.GetModelResponse:  # noqa: N802
        return self.cell

    async def GetStats(self, request: Any, context: Any) -> scheduler_pb2.CellStats:  # noqa: N802
        return self.stats

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


def end_token_id() -> int:
    """The special token that ends an answer."""
    return make_byte_level_tokenizer().get_vocab()["<|end|>"]


def answer_with(token_ids: list[int], cached_tokens: int = 0, stop_token_id: int | None = None) -> OnSubmit:
    """Answer every sequence with these tokens, one a message, as far as `max_tokens` goes; then it ends.

    With `stop_token_id` the sequence ends by that token.
    """

    def on_submit(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        wanted = token_ids if stop_token_id is None else [*token_ids, stop_token_id]
        given = wanted[: submit.sampling.max_tokens]
        stopped = stop_token_id is not None and len(given) == len(wanted)
        reason = common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
        num_logprobs = submit.sampling.num_logprobs if submit.sampling.HasField("num_logprobs") else None
        for idx, token_id in enumerate(given):
            for index in range(submit.n):
                fields: dict[str, Any] = {"index": index}
                if num_logprobs is not None:
                    fields["logprobs"] = [make_logprobs(token_id, num_logprobs)]
                if idx == len(given) - 1:
                    fields |= {"finish_reason": reason, "usage": make_usage(len(given), cached_tokens)}
                session.run(submit.request_id, idx, [token_id], **fields)

    return on_submit


def make_logprobs(token_id: int, num_alternatives: int) -> common_pb2.TokenLogprobs:
    others = [token_id, *range(num_alternatives)][:num_alternatives]
    return common_pb2.TokenLogprobs(
        logprob=-0.5, top_token_ids=others, top_logprobs=[-0.5 - rank for rank in range(len(others))]
    )


def refuse_with(code: "common_pb2.ErrorCode.ValueType", message: str, param: str = "") -> OnSubmit:
    """End every request with an error before it has a token."""

    def on_submit(session: FakeSession, submit: scheduler_pb2.Submit) -> None:
        error = common_pb2.Error(code=code, message=message, param=param)
        for index in range(submit.n):
            session.run(
                submit.request_id, 0, [], index=index, finish_reason=common_pb2.FINISH_REASON_ERROR, error=error
            )

    return on_submit


@dataclass
class Cell:
    """A gateway and the scripted scheduler behind it."""

    gateway: Gateway
    scheduler: FakeScheduler
    url: str
    http: httpx.AsyncClient
    openai: AsyncOpenAI

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(make_byte_level_tokenizer().encode(text).ids)

    def answer(self, text: str, cached_tokens: int = 0, stop_token_id: int | None = None) -> None:
        """Let the scheduler answer every request with this text."""
        self.scheduler.on_submit = answer_with(self.ids(text), cached_tokens, stop_token_id)

    async def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        """Post a chat completion."""
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        """Post a completion."""
        return await self.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt} | fields)


@contextlib.asynccontextmanager
async def running_gateway(settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, str]]:
    """Serve over HTTP on a free port; yields the gateway and its URL."""
    gateway = Gateway.load(settings)
    server = Server(gateway)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    await server.is_listening.wait()
    try:
        yield gateway, url_of(listener)
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def running_cell(folder: Path, scheduler: FakeScheduler | None = None, **settings: Any) -> AsyncIterator[Cell]:
    """Serve with a scripted scheduler; yields when the gateway knows the model."""
    scheduler = scheduler or FakeScheduler()
    await scheduler.start()
    chosen = GatewaySettings(model=str(folder), scheduler=scheduler.address, **settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(scheduler.stop)
        gateway, url = await stack.enter_async_context(running_gateway(chosen))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        openai = await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        # The model is known a moment after the session is up, when the cell has one.
        has_model = scheduler.cell.HasField("model")
        await eventually(lambda: gateway.session.is_connected and (gateway.session.cell is not None) == has_model)
        yield Cell(gateway, scheduler, url, http, openai)
