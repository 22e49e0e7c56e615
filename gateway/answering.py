"""From a checked request to a reply under way: what chat completions and completions have in common."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.admission import Admission
from gateway.chat_template import load_chat_template
from gateway.errors import InvalidRequestError, UnknownModelError
from gateway.metrics import Metrics, RequestMetrics
from gateway.prompts import Limits, Prompts
from gateway.reply import Reply
from gateway.sampling import sampling_params
from gateway.schemas import GenerateRequest
from gateway.session import SchedulerSession
from gateway.settings import GatewaySettings
from gateway.shapes import Shape
from gateway.streaming import StreamedReply, WholeReply
from gateway.tenants import Tenants
from gateway.tokenizer import ModelTokenizer
from protos import common_pb2, scheduler_pb2
from protos.credentials import Credentials

MAX_SUBMIT_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a gateway process has: made once, used by every request."""

    settings: GatewaySettings
    prompts: Prompts
    session: SchedulerSession
    admission: Admission
    metrics: Metrics
    tenants: Tenants

    @classmethod
    def load(cls, settings: GatewaySettings) -> "Gateway":
        """Read the model's folder, keys and certificates. Raises StartupError and FileMistakeError."""
        folder = Path(settings.model)
        tokenizer = ModelTokenizer.load(folder)
        prompts = Prompts(tokenizer, load_chat_template(folder, settings.chat_template))
        session = SchedulerSession(settings.scheduler, Credentials.of_client(settings))
        return cls(settings, prompts, session, Admission(session), Metrics(), Tenants.from_settings(settings))

    @property
    def model_name(self) -> str:
        """The name by which clients call the model. Raises UnavailableError before a worker has registered."""
        return self.settings.served_model_name or str(self.session.require_cell().model.name)

    @property
    def limits(self) -> Limits:
        """What a prompt must fit. Raises UnavailableError before a worker has registered."""
        return Limits.from_wire(self.session.require_cell())

    @property
    def request_metrics(self) -> RequestMetrics:
        """Where requests are counted. Raises UnavailableError before a worker has registered."""
        return self.metrics.for_model(self.model_name)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError when a request names another model than the one served; it may name none."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(name)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where a request's prompts come from."""

    param: str  # the parameter that holds them
    num_prompts: int
    tokenize: Callable[[], Awaitable[Sequence[list[int]]]]


async def respond(
    gateway: Gateway,
    request: GenerateRequest,
    tenant: str,
    reply_id: str,
    source: PromptSource,
    make_shape: Callable[[Sequence[list[int]]], Shape],
) -> StreamedReply | WholeReply:
    """Tokenize and submit a request; return the HTTP response that the client asked for, which owns what was begun.

    `make_shape` gets the prompts' token ids, which are valid by then. Raises ApiError, and nothing is submitted then.
    """
    gateway.check_model(request.model)
    gateway.admission.check_size(source.num_prompts * request.n, "n" if request.n > 1 else source.param)
    with gateway.admission.preparing(source.num_prompts, tenant):
        prompts = await source.tokenize()
        limits = gateway.limits
        submits = [
            _submit(request, tenant, f"{reply_id}-{idx}", token_ids, limits, source.param)
            for idx, token_ids in enumerate(prompts)
        ]
        shape = make_shape(prompts)
        reply = Reply(gateway.session, gateway.prompts.tokenizer, gateway.request_metrics, gateway.admission, request)
        reply.submit(submits, gateway.settings.request_timeout_seconds)
    if request.stream:
        return StreamedReply(reply, shape, gateway.settings.client_stall_seconds)
    return WholeReply(reply, shape)


def _precision_floor(name: str | None) -> common_pb2.KvFormat.ValueType | None:
    return None if name is None else common_pb2.KvFormat.Value(f"KV_FORMAT_{name.upper()}")


def _beam_search(request: GenerateRequest) -> scheduler_pb2.BeamSearch | None:
    return scheduler_pb2.BeamSearch(length_penalty=request.length_penalty) if request.use_beam_search else None


def _submit(
    request: GenerateRequest, tenant: str, request_id: str, token_ids: list[int], limits: Limits, param: str
) -> scheduler_pb2.Submit:
    floor = _precision_floor(request.kv_precision_floor)
    room_tokens = limits.room_tokens(len(token_ids), param, floor)
    submit = scheduler_pb2.Submit(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling_params(request, limits.vocab_size, room_tokens),
        n=request.n,
        tenant=tenant,
        priority=request.priority,
        cache_salt=request.cache_salt,
        kv_precision_floor=floor,
        beam_search=_beam_search(request),
    )
    if (num_bytes := submit.ByteSize()) > MAX_SUBMIT_BYTES:
        raise InvalidRequestError(
            f"The request takes {num_bytes} bytes, more than the {MAX_SUBMIT_BYTES} that one may have.", param
        )
    return submit
