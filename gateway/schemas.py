"""The requests that clients send, as OpenAI and vLLM spell them, checked for types and ranges.

A null is the same as leaving the field out. A field that nobody knows is accepted, since clients send extras; a field
that is known and not supported here is refused rather than ignored. What depends on the model (vocabulary, context) is
checked later, in `gateway/sampling.py` and `gateway/prompts.py`. A list that may be long is checked up to its first
mistake (`fail_fast`): to describe a million of them takes seconds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gateway.errors import InvalidRequestError, UnsupportedError
from gateway.tenants import MAX_TENANT_CHARS

MAX_N = 16
MAX_PROMPTS = 128
MAX_MESSAGES = 65_536
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 4096
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_SHOWN_TOKENS = 2**20  # of a text: while millions are turned to JSON no stream gets a token
# A logit divided by a smaller penalty may be infinite in float32; a smaller share of the probability than this is the
# likeliest token alone.
MIN_REPETITION_PENALTY = 0.01
MIN_TOP_P = 1e-6
MAX_LENGTH_PENALTY = 10  # as a power of the longest context's length it stays a float
# Fields that a beam search cannot follow, and their values that ask for nothing. How tokens are drawn (temperature,
# top_p and the like) is no matter to it, for it draws none.
_NOT_IN_BEAM_SEARCH: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
    "stop": [],
}

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

# Fields that would change the answer, and the values that ask for nothing (null, false, "" and empty ones never do).
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (),
    "documents": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}

TokenId = Annotated[int, Field(ge=0)]
Prompt = str | list[int]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _token_biases(value: object) -> object:
    """Turn the keys of a JSON object, which are strings, into token ids."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:  # before each is looked at: a dict is not checked up to its first mistake only
        raise ValueError(f"{len(value)} entries are more than the {MAX_BIASES} that a request may have")
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError:
        raise ValueError("keys must be token ids") from None


def _prompts(value: object) -> list[Prompt]:
    """Return the prompts of the four forms that a completion takes: a text, tokens, and lists of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be empty")
    if _are_token_ids(value):
        return [value]
    if not (all(isinstance(item, str) for item in value) or all(_are_token_ids(item) for item in value)):
        raise ValueError("a list must hold only strings, only token ids, or only lists of token ids")
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"{len(value)} prompts are more than the {MAX_PROMPTS} that one request may have")
    return value


def _are_token_ids(value: object) -> bool:
    # A bool is an int in Python, so the exact type is asked for.
    return isinstance(value, list) and all(type(item) is int for item in value)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class GenerateRequest(_Body):
    """What chat completions and completions have in common."""

    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=MIN_TOP_P, le=1)
    top_k: int = Field(0, ge=-1, le=_INT32_MAX)  # -1 and 0: off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=_INT64_MIN, le=_UINT64_MAX)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[
        list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), BeforeValidator(_as_list)
    ] = []
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS, fail_fast=True)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_token_biases)] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=_INT32_MIN, le=_INT32_MAX)
    cache_salt: str = Field("", max_length=1024)
    user: str = Field("", max_length=MAX_TENANT_CHARS)  # without API keys: the tenant
    use_beam_search: bool = False  # of width n
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    kv_precision_floor: Literal["native", "int8", "fp8", "k8v4", "int4"] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def output_limit(self) -> int | None:
        """Output tokens that the client allows; the newer name wins. None: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that the client wants for each token; 0: the chosen token alone; None: no log probabilities."""
        raise NotImplementedError

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer is the rest of the prompt's text, rather than a text of its own."""
        return False

    @model_validator(mode="after")
    def _check_together(self) -> "GenerateRequest":
        for name, value in (self.model_extra or {}).items():
            # Not `if value`: vLLM's `prompt_logprobs: 0` asks for something.
            asks = value is not False and value not in ("", [], {})
            if name in _UNSUPPORTED and asks and value not in _UNSUPPORTED[name]:
                raise UnsupportedError(name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("`stream_options` is only allowed when `stream` is true.", "stream_options")
        self._check_beam_search()
        limit = self.output_limit
        if limit is not None and self.min_tokens > limit:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(
                f"`min_tokens` ({self.min_tokens}) must not be greater than `{name}` ({limit}).", "min_tokens"
            )
        return self

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise InvalidRequestError("`length_penalty` needs `use_beam_search` to be true.", "length_penalty")
            return
        for name, off in _NOT_IN_BEAM_SEARCH.items():
            if getattr(self, name) != off:
                raise UnsupportedError(name, f"`{name}` together with `use_beam_search`")


class ChatMessage(BaseModel):
    """One message of a conversation; further fields reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None


class _ChatPrompt(_Body):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # the template writes them
    chat_template_kwargs: dict[str, Any] = {}


class ChatCompletionRequest(GenerateRequest, _ChatPrompt):
    """`POST /v1/chat/completions`."""

    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        return self


class CompletionRequest(GenerateRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each token."""
        return self.logprobs

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer is the rest of the prompt's text: it is."""
        return True

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise UnsupportedError("echo", "`echo` together with `logprobs`")
        return self


class TokenizeRequest(_Body):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(_ChatPrompt):
    """`POST /tokenize` of a conversation."""

    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """`POST /detokenize`."""

    tokens: list[TokenId] = Field(max_length=MAX_SHOWN_TOKENS, fail_fast=True)


_T = TypeVar("_T", bound=BaseModel)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises InvalidRequestError."""
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"The request's body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("The request's body must be a JSON object.")
    return fields


def check(request_class: type[_T], fields: dict[str, Any]) -> _T:
    """Return the request with these fields. Raises InvalidRequestError, which names the first parameter at fault."""
    try:
        return request_class.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = _param_name(first["loc"])
        if first["type"] == "missing":
            raise InvalidRequestError(f"Missing required parameter: `{param}`.", param) from error
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidRequestError(f"Invalid value for `{param}`: {message}.", param) from error


def _param_name(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].role` for ("messages", 0, "role"); what pydantic adds for union members is left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int"):
            name += f".{part}" if name else part
    return name
