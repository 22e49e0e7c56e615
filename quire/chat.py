"""`quire chat`: a conversation in the terminal with whatever an OpenAI-compatible server serves.

A line that ends with a backslash goes on in the next; /new starts over; Ctrl-C stops an answer; Ctrl-D ends it all.
"""

import contextlib
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from protos.settings import SettingsMistakeError, read_settings

Messages = list[dict[str, str]]

_LOST = (OSError, http.client.HTTPException)  # a connection that cannot be made, or ends too early


class ChatSettings(BaseSettings):
    """Whom to talk to, and how. Variables are named QUIRE_CHAT_URL and so on."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_CHAT_",
        frozen=True,
        cli_prog_name="quire chat",
        cli_kebab_case=True,
        cli_exit_on_error=False,
    )

    url: str = Field("http://localhost:8000", description="server, without /v1")
    model: str = Field("", description="model name; empty: the first one that the server offers")
    api_key: str = Field("", description="bearer token, where the server wants one")
    system: str = Field("", description="system message; empty: the chat template's own")
    temperature: float = Field(0.7, ge=0, description="randomness of the answers; 0: always the likeliest token")
    max_tokens: int = Field(1024, ge=1, description="tokens of an answer at most")


class ChatError(Exception):
    """The server cannot be reached, refused or stopped; the message is one line."""


def _open(settings: ChatSettings, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the response to a GET, or with a body to a POST of it as JSON. Raises ChatError."""
    headers = {"Content-Type": "application/json"}
    if settings.api_key:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(settings.url.rstrip("/") + path, data, headers))
    except urllib.error.HTTPError as error:
        with error, contextlib.suppress(*_LOST):
            raise ChatError(f"the server refused: {error.read().decode(errors='replace')}") from None
        raise ChatError(f"the server refused: {error}") from None
    except (*_LOST, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ChatError(f"no server at {settings.url}: {reason} (start one with: quire serve)") from None


def _lines(response: Any) -> Iterator[bytes]:
    """Yield the whole lines of a response as they come, until it ends or breaks off."""
    with contextlib.suppress(*_LOST):
        yield from (line for line in response if line.endswith(b"\n"))


def first_model(settings: ChatSettings) -> str:
    """Return the name of the first model that the server offers. Raises ChatError."""
    with _open(settings, "/v1/models") as response:
        try:
            name: str = json.load(response)["data"][0]["id"]
        except (*_LOST, ValueError, LookupError) as error:
            raise ChatError(f"{settings.url} offers no model: {error!r} (--model names one)") from None
        return name


def answer(settings: ChatSettings, model: str, messages: Messages) -> Iterator[str]:
    """Yield the pieces of the answer to `messages` as they come. Raises ChatError."""
    body = {
        "model": model,
        "messages": messages,
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "stream": True,
    }
    with _open(settings, "/v1/chat/completions", body) as response:
        for raw in _lines(response):
            data = raw.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if not raw.startswith(b"data:"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"].get("message", data))
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    raise ChatError("the server stopped in the middle of its answer")


def _read_message() -> str:
    """Return what the person types, over as many lines as end with a backslash. Raises EOFError."""
    lines = [input("you> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("...> "))
    return "\n".join(lines).strip()


def _take_turn(settings: ChatSettings, model: str, messages: Messages) -> None:
    """Print the answer to `messages` and append it; Ctrl-C keeps what came so far."""
    pieces: list[str] = []
    print(f"{model}> ", end="", flush=True)
    try:
        for piece in answer(settings, model, messages):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        print()
    messages.append({"role": "assistant", "content": "".join(pieces)})


def chat(settings: ChatSettings) -> None:
    """Hold a conversation until the person ends it. Raises ChatError."""
    model = settings.model or first_model(settings)
    start: Messages = [{"role": "system", "content": settings.system}] if settings.system else []
    messages = list(start)
    print(f"Talking to {model} at {settings.url}; /new starts over, Ctrl-D ends")
    while True:
        try:
            text = _read_message()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/new":
            messages = list(start)
        elif text:
            messages.append({"role": "user", "content": text})
            _take_turn(settings, model, messages)


def main(argv: Sequence[str]) -> int:
    """Chat; return the exit code."""
    try:
        chat(read_settings(ChatSettings, argv))
    except SettingsMistakeError as error:
        print(f"quire chat: {error} (quire chat --help shows every flag)", file=sys.stderr)
        return 2
    except ChatError as error:
        print(f"quire chat: {error}", file=sys.stderr)
        return 1
    return 0
