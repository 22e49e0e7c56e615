"""A load generator for any OpenAI-compatible server: `python -m bench.load --url http://localhost:8000`.

Streams of completions or of chats at a fixed concurrency, or at the random times of a request rate; prompts and output
lengths from distributions; shared prefixes. The same seed sends the same requests. Prints a table, or writes JSON. Ends
with exit code 1 when requests failed; the figures are those of the others.
"""

import asyncio
import sys
from pathlib import Path

import uvloop
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from bench.client import Server, ServerError, Timing, find_model, try_closed_loop, try_open_loop
from bench.report import LoadFigures, say
from bench.workload import Lengths, Workload


class LoadSettings(BaseSettings):
    """Flags of the load generator. Lengths are N, LOW:HIGH (uniform) or LOW:HIGH:log (uniform in the logarithm)."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_LOAD_",
        frozen=True,
        cli_prog_name="python -m bench.load",
        cli_kebab_case=True,
        cli_implicit_flags=True,
    )

    url: str = Field("http://localhost:8000", description="server, without /v1")
    model: str = Field("", description="model name; empty: the first one that the server offers")
    api_key: str = Field("", description="bearer token")
    chat: bool = Field(False, description="send chat completions, with the prompt as the only message")
    num_requests: int = Field(64, ge=1, description="requests")
    concurrency: int = Field(8, ge=1, description="requests at once; not used with --request-rate")
    request_rate: float = Field(0.0, ge=0, description="requests a second, at random times; 0: use --concurrency")
    prompt_tokens: str = Field("64:512", description="tokens of a prompt's own part")
    output_tokens: str = Field("16:256", description="tokens of an output")
    shared_prefix_tokens: int = Field(
        0, ge=0, description="tokens of a prefix that prompts share, before their own part"
    )
    num_prefixes: int = Field(1, ge=1, description="different shared prefixes")
    vocab_size: int = Field(
        0, ge=0, description="prompts are token ids below this, so counts are exact; 0: prompts are text, about right"
    )
    ignore_eos: bool = Field(
        True, description="ask for outputs of full length (an extension; not every server knows it)"
    )
    seed: int = Field(0, description="of lengths, contents and arrival times")
    json_path: str = Field("", description="file to write the figures to, as JSON; -: standard output, and no table")

    @field_validator("url")
    @classmethod
    def _without_end_slash(cls, value: str) -> str:
        return value.rstrip("/")

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _check_lengths(cls, value: str) -> str:
        Lengths.parse(value)
        return value

    @model_validator(mode="after")
    def _check_chat(self) -> "LoadSettings":
        if self.chat and self.vocab_size:
            raise ValueError("--chat and --vocab-size: a message is text")
        return self

    def workload(self) -> Workload:
        """Return what the flags describe."""
        return Workload(
            num_requests=self.num_requests,
            prompt_tokens=Lengths.parse(self.prompt_tokens),
            output_tokens=Lengths.parse(self.output_tokens),
            shared_prefix_tokens=self.shared_prefix_tokens,
            num_prefixes=self.num_prefixes,
            vocab_size=self.vocab_size or None,
        )


async def run(settings: LoadSettings) -> tuple[LoadFigures, list[ServerError]]:
    """Send the load; return its figures, and what failed. Raises ServerError when no request was answered."""
    model = settings.model or await find_model(settings.url, settings.api_key)
    server = Server(settings.url, model, settings.api_key, settings.ignore_eos, settings.chat)
    jobs = settings.workload().jobs(settings.seed)
    if settings.request_rate:
        outcomes = await try_open_loop(server, jobs, settings.request_rate, settings.seed)
    else:
        outcomes = await try_closed_loop(server, jobs, settings.concurrency)
    timings = [outcome for outcome in outcomes if isinstance(outcome, Timing)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, ServerError)]
    if not timings:
        raise ServerError(f"all {len(failures)} requests failed, the first with {failures[0]}")
    return LoadFigures.of(timings, len(failures)), failures


def main() -> int:
    """Run one load from the command line; return the exit code."""
    settings = CliApp.run(LoadSettings)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures, failures = runner.run(run(settings))
    except ServerError as error:
        print(f"bench.load: {error}", file=sys.stderr)
        return 1
    say(figures.as_json() if settings.json_path == "-" else figures.as_table())
    if settings.json_path not in ("", "-"):
        Path(settings.json_path).write_text(figures.as_json() + "\n")
    for failure in dict.fromkeys(map(str, failures)):
        print(f"bench.load: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
