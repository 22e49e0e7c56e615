"""OpenAI's JSON of answers: whole ones, and the chunks of streams as server-sent events.

Of a chunk only the choice changes from one token to the next, so what comes before and after it is encoded once.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.choice import Delta, TokenLogprob
from gateway.reply import Usage
from gateway.tokenizer import ModelTokenizer

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

STREAM_END = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
_ENDING = ',"finish_reason":null}'


def event(payload: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {encode_json(payload)}\n\n".encode()


class Shape(Protocol):
    """The JSON of one kind of answer."""

    def opening(self, choice_idx: int) -> bytes:
        """Return what a choice's part of a stream begins with, b"" for nothing."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events for a step's addition to a choice, b"" when there is nothing to say."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event that ends a stream with `include_usage`."""

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> dict[str, Any]:
        """Return the answer that is not a stream; `choices` holds the deltas of each."""


class _Stream:
    """The frame of a stream's chunks."""

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._begin = "data: " + encode_json(head)[:-1] + ',"choices":['
        # A client that asked for usage gets the field in every chunk, null but in the last.
        self._end = ('],"usage":null}' if include_usage else "]}") + "\n\n"

    def chunk(self, choice: str) -> bytes:
        """Return the event of one choice, given as JSON."""
        return (self._begin + choice + self._end).encode()

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the event of no choice, with the usage."""
        return f'{self._begin}],"usage":{encode_json(usage_json(usage))}}}\n\n'.encode()


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, reply_id: str, model: str, tokenizer: ModelTokenizer, include_usage: bool) -> None:
        self._head = {"id": reply_id, "object": "chat.completion", "created": int(time.time()), "model": model}
        self._stream = _Stream(self._head | {"object": "chat.completion.chunk"}, include_usage)
        self._tokenizer = tokenizer

    def opening(self, choice_idx: int) -> bytes:
        """Return the chunk with the role."""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null'
        return self._stream.chunk(f'{{"index":{choice_idx},{delta}{_ENDING}')

    def chunk(self, delta: Delta) -> bytes:
        """Return a chunk with the text, and one with the finish reason."""
        events = b""
        if delta.text or delta.logprobs:
            logprobs = encode_json(self._logprobs(delta.logprobs)) if delta.logprobs else "null"
            content = f'"delta":{{"content":{encode_json(delta.text)}}},"logprobs":{logprobs}'
            events = self._stream.chunk(f'{{"index":{delta.choice_idx},{content}{_ENDING}')
        if delta.finish_reason is not None:
            choice = {"index": delta.choice_idx, "delta": {}, "logprobs": None}
            events += self._stream.chunk(encode_json(choice | _finish_json(delta)))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk with the usage."""
        return self._stream.usage_chunk(usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        return self._head | {"choices": [self._choice(deltas) for deltas in choices], "usage": usage_json(usage)}

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None}
        tokens = [token for delta in deltas for token in delta.logprobs]
        choice = {"index": deltas[-1].choice_idx, "message": message}
        return choice | {"logprobs": self._logprobs(tokens) if tokens else None} | _finish_json(deltas[-1])

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [self._token(token_id, logprob) for token_id, logprob in token.alternatives]
            content.append(self._token(token.token_id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionShape:
    """`text_completion`, the same for streams; with `echo` each choice's text begins with its prompt."""

    def __init__(
        self, reply_id: str, model: str, tokenizer: ModelTokenizer, include_usage: bool, echoes: Sequence[str]
    ) -> None:
        """Take the text that each choice begins with, in `echoes`; none without echo."""
        self._head = {"id": reply_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._stream = _Stream(self._head, include_usage)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # characters of the tokens so far, by choice

    def opening(self, choice_idx: int) -> bytes:
        """Return the chunk that echoes the prompt."""
        return self._text_chunk(choice_idx, self._echoes[choice_idx], "null") if self._echoes else b""

    def chunk(self, delta: Delta) -> bytes:
        """Return a chunk with the text, and one with the finish reason."""
        events = b""
        if delta.text or delta.logprobs:
            logprobs = encode_json(self._logprobs(delta.choice_idx, delta.logprobs)) if delta.logprobs else "null"
            events = self._text_chunk(delta.choice_idx, delta.text, logprobs)
        if delta.finish_reason is not None:
            choice = {"index": delta.choice_idx, "text": "", "logprobs": None}
            events += self._stream.chunk(encode_json(choice | _finish_json(delta)))
        return events

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk with the usage."""
        return self._stream.usage_chunk(usage)

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> dict[str, Any]:
        """Return the `text_completion` object."""
        return self._head | {"choices": [self._choice(deltas) for deltas in choices], "usage": usage_json(usage)}

    def _text_chunk(self, choice_idx: int, text: str, logprobs: str) -> bytes:
        content = f'"text":{encode_json(text)},"logprobs":{logprobs}'
        return self._stream.chunk(f'{{"index":{choice_idx},{content}{_ENDING}')

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choice_idx = deltas[-1].choice_idx
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.logprobs]
        choice = {"index": choice_idx, "text": (self._echoes[choice_idx] if self._echoes else "") + text}
        return choice | {"logprobs": self._logprobs(choice_idx, tokens) if tokens else None} | _finish_json(deltas[-1])

    def _logprobs(self, choice_idx: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        logprobs = [_finite(token.logprob) for token in tokens]
        offset = self._offsets.get(choice_idx, 0)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[choice_idx] = offset
        top = [self._top(token) | {text: logprob} for token, text, logprob in zip(tokens, texts, logprobs, strict=True)]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        text_of = self._tokenizer.token_text
        return {text_of(token_id): _finite(logprob) for token_id, logprob in token.alternatives}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    known = usage.num_cached_tokens is not None
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens} if known else None,
    }


def _finish_json(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _finite(logprob: float) -> float:
    """Return what JSON can carry: minus infinity, and what is no number, become the least value."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
