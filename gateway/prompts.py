"""From what a client sends to a prompt's token ids: chat template, tokenizer, and the limits of model and cell."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.chat_template import ChatTemplate
from gateway.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from gateway.sampling import check_token_ids
from gateway.schemas import ChatMessage, Prompt
from gateway.tokenizer import ModelTokenizer
from protos import scheduler_pb2

# Conversations of fewer characters are rendered at once, longer ones in a thread, beside the streams.
_LONG_CONVERSATION_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class Limits:
    """What a prompt must fit, in tokens."""

    vocab_size: int
    max_model_len: int
    kv_capacity_tokens: int  # of the largest worker's KV pool
    kv_capacity_tokens_by_floor: Mapping[int, int]  # likewise, of a request with this kv_precision_floor

    @classmethod
    def from_wire(cls, cell: scheduler_pb2.GetModelResponse) -> "Limits":
        """Return the limits that a cell states."""
        return cls(
            cell.model.vocab_size, cell.model.max_model_len, cell.kv_capacity_tokens, cell.kv_capacity_tokens_by_floor
        )

    def check_text(self, text: str, tokenizer: ModelTokenizer, param: str) -> None:
        """Raise ContextLengthError for a text so long that tokenizing it, which may take seconds, is in vain."""
        min_tokens, most_tokens = tokenizer.min_tokens(text), min(self.max_model_len, self.kv_capacity_tokens)
        if min_tokens >= most_tokens:
            raise ContextLengthError(
                f"This server takes prompts of less than {most_tokens} tokens, "
                f"and this one has at least {min_tokens} tokens.",
                param,
            )

    def room_tokens(self, num_prompt_tokens: int, param: str, floor: int | None = None) -> int:
        """Return how many output tokens fit behind a prompt, at least 1. Raises InvalidRequestError.

        `floor` is the request's kv_precision_floor. A prompt that is too long for that alone is the scheduler's to
        refuse.
        """
        if num_prompt_tokens == 0:
            raise InvalidRequestError(
                f"`{param}`: the prompt is empty: it has 0 tokens, and must have at least 1.", param
            )
        if num_prompt_tokens >= self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has "
                f"{num_prompt_tokens} tokens: no room is left for an answer.",
                param,
            )
        if num_prompt_tokens >= self.kv_capacity_tokens:
            raise ContextLengthError(
                f"The KV cache of this server holds {self.kv_capacity_tokens} tokens, and the prompt has "
                f"{num_prompt_tokens} tokens: no room is left for an answer.",
                param,
            )
        capacity_tokens = self.kv_capacity_tokens
        if floor is not None:
            capacity_tokens = self.kv_capacity_tokens_by_floor.get(floor, capacity_tokens)
        return max(1, min(self.max_model_len, capacity_tokens) - num_prompt_tokens)


class Prompts:
    """Makes token ids with one model's tokenizer and chat template."""

    def __init__(self, tokenizer: ModelTokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template

    async def of_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        variables: dict[str, Any],
        limits: Limits,
        add_special_tokens: bool,
    ) -> list[int]:
        """Return the token ids of a conversation. Raises InvalidRequestError.

        The template writes special tokens itself; the tokenizer adds others where it is told to.
        """
        if self._template is None:
            raise InvalidRequestError("This model has no chat template: use /v1/completions.", "messages")
        plain = [_plain_message(message, idx) for idx, message in enumerate(messages)]
        if sum(len(message["content"]) for message in plain) < _LONG_CONVERSATION_CHARS:
            text = self._template.render(plain, add_generation_prompt, variables)
        else:
            text = await asyncio.to_thread(self._template.render, plain, add_generation_prompt, variables)
        return await self._of_text(text, add_special_tokens, limits, "messages")

    async def of_completion(self, prompt: Prompt, add_special_tokens: bool, limits: Limits) -> list[int]:
        """Return the token ids of a completion's prompt, given as text or as ids. Raises InvalidRequestError."""
        if isinstance(prompt, str):
            return await self._of_text(prompt, add_special_tokens, limits, "prompt")
        limits.room_tokens(len(prompt), "prompt")  # before a look at each of millions of ids
        check_token_ids(prompt, limits.vocab_size, "prompt")
        return prompt

    async def _of_text(self, text: str, add_special_tokens: bool, limits: Limits, param: str) -> list[int]:
        limits.check_text(text, self.tokenizer, param)
        token_ids = await self.tokenizer.encode(text, add_special_tokens, param)
        # A tokenizer may know more tokens than the model: a padding token that was added to it, say.
        if max(token_ids, default=0) >= limits.vocab_size:
            check_token_ids(token_ids, limits.vocab_size, param)
        return token_ids


def _plain_message(message: ChatMessage, idx: int) -> dict[str, Any]:
    """Return a message as templates know it: `content` is a string, and no role is newer than they are."""
    # Templates ask whether a field is there, and clients send null for what a message lacks.
    fields = {name: value for name, value in message.model_dump(exclude_unset=True).items() if value is not None}
    # OpenAI's newer name of the same role.
    if message.role == "developer":
        fields["role"] = "system"
    if message.content is None and message.role != "assistant":
        raise InvalidRequestError(f"Missing required parameter: `messages[{idx}].content`.", f"messages[{idx}].content")
    fields["content"] = _text_content(message.content or "", f"messages[{idx}].content")
    return fields


def _text_content(content: str | list[dict[str, Any]], param: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for idx, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise UnsupportedError(f"{param}[{idx}].type", f"Content of type {str(kind)!r}")
        if not isinstance(text, str):
            raise InvalidRequestError(f"`{param}[{idx}].text` must be a string.", f"{param}[{idx}].text")
        texts.append(text)
    return "\n".join(texts)
