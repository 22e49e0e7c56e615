"""What every comparison script shares: its flags, and where its findings go."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn

import uvloop
from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from bench.report import Finding, say


class CompareSettings(BaseSettings):
    """Flags of a comparison."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_BENCH_", frozen=True, cli_kebab_case=True, cli_implicit_flags=True
    )

    repeats: int = Field(
        0, ge=0, description="times that both sides run in turn; 0: as many as the script thinks right"
    )
    model: str = Field("bundled", description="model as for quire serve")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="compute dtype of every side")
    findings_path: str = Field("", description="file to write the findings to, as JSON; empty: none")


Measure = Callable[[CompareSettings, int], Coroutine[Any, Any, list[Finding]]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def run_comparison(
    measure: Measure,
    default_repeats: int,
    settings: CompareSettings | None = None,
    loop_factory: LoopFactory = uvloop.new_event_loop,
) -> NoReturn:
    """Run `measure(settings, repeats)` and print its findings; settings come from the command line if not given.

    Ends the process, with exit code 1 when a claim was missed.
    """
    settings = settings or CliApp.run(CompareSettings)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        findings = runner.run(measure(settings, settings.repeats or default_repeats))
    conclude(findings, settings)


def conclude(findings: list[Finding], settings: CompareSettings) -> NoReturn:
    """Print findings, write them where `settings` says, and end the process, with exit code 1 when one was missed."""
    for finding in findings:
        say(str(finding))
    if settings.findings_path:
        Path(settings.findings_path).write_text(json.dumps([asdict(finding) for finding in findings]))
    sys.exit(0 if all(finding.holds for finding in findings) else 1)


def read_findings(path: Path) -> list[Finding]:
    """Return the findings that a script wrote; none when it ended before that."""
    return [Finding(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
