"""The model's chat template: Jinja, rendered in a sandbox, with the helpers that templates on the Hub rely on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import InvalidRequestError, StartupError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what a model is trained on; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Turns a conversation into a prompt."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template. Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt's text; `variables` are the request's own. Raises InvalidRequestError."""
        context = {"tools": None, "documents": None} | self._special_tokens | dict(variables)
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(context)
        except Exception as error:  # a template can fail in any way that Python can
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {error}", "messages"
            ) from error


def load_chat_template(folder: Path, override: str) -> ChatTemplate | None:
    """Return the template of the file `override`, else the model folder's own; None when it has none.

    Raises StartupError for a file that cannot be read or a template that is not valid.
    """
    config = _read_tokenizer_config(folder)
    special_tokens = {name: text for name in _SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name)))}
    own_file = folder / "chat_template.jinja"
    source: str | None
    if override:
        origin, source = override, _read(Path(override))
    elif own_file.is_file():
        origin, source = str(own_file), _read(own_file)
    else:
        origin, source = str(folder / "tokenizer_config.json"), _default_template(config.get("chat_template"))
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"{origin}: line {error.lineno} of the chat template: {error.message}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise StartupError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path}: not a JSON object")
    return config


def _token_text(token: object) -> str | None:
    """Return a special token's text: folders spell it as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _default_template(templates: object) -> str | None:
    """Return the template: folders have a string, or a list of named ones."""
    if isinstance(templates, list):
        named = {entry.get("name"): entry.get("template") for entry in templates if isinstance(entry, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None
