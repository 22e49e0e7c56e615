"""The flags of `quire serve`: those of the three services together, and a few of its own.

A flag that services share (`--model`, `--max-num-seqs`) is typed once and reaches each of them. Every flag can be given
as a variable instead: `--block-size 16` is `QUIRE_BLOCK_SIZE=16`.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, CliSuppress, SettingsConfigDict

from gateway.settings import GatewaySettings
from protos.settings import ENV_PREFIX
from protos.settings_files import FOLDERS_VARIABLE
from scheduler_svc.core.precision import NATIVE_DTYPES, name_of
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

LogLevel = Literal["debug", "info", "warning", "error"]


class ServeSettings(GatewaySettings, SchedulerSettings, WorkerSettings):
    """Settings of a whole cell on this machine, and of the supervisor that runs it."""

    model_config = SettingsConfigDict(cli_prog_name="quire serve")

    log_level: LogLevel = Field("warning", description="least severe log lines that are shown")
    cluster_token: str = Field(
        "", description="secret that every call between services carries; empty: a new random one each time"
    )
    scheduler_port: int = Field(
        0, ge=0, le=65535, description="port of the scheduler's gRPC service, on loopback; 0: any free one"
    )
    gateway_drain_seconds: float = Field(
        10.0, ge=0, description="seconds that running requests get to finish when the server is stopped"
    )
    # The gateway is stopped first, and its requests have ended by then.
    scheduler_drain_seconds: CliSuppress[float] = 1.0
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="worker processes, each with its own weights and KV cache, and where there are GPUs with its own "
        "GPU, unless --device names one",
    )
    # When the workers are stopped nobody is left who waits for them.
    worker_drain_seconds: CliSuppress[float] = 0.0
    # Where the internal services listen is the supervisor's to choose.
    scheduler: CliSuppress[str] = ""
    worker_port: CliSuppress[int] = 0
    worker_address: CliSuppress[str] = ""

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        formats = {name_of(fmt) for fmt in self.precision().formats}
        if self.kv_formats != "all" and (missing := formats - {"native", *self.kv_formats.split(",")}):
            raise ValueError(f"--kv-formats: without {', '.join(sorted(missing))}, which the precision policy uses")
        dtype, own_dtype = NATIVE_DTYPES.get(self.kv_cache_dtype), "bfloat16" if self.dtype == "auto" else self.dtype
        if dtype not in (None, own_dtype):
            raise ValueError(f"--kv-cache-dtype: native KV is {own_dtype}, as --dtype says, not {dtype}")
        return self


def child_environ(settings: ServeSettings, service: type[BaseSettings], **overrides: Any) -> dict[str, str]:
    """Return the environment of a child process: this one's, with the fields of its settings class as variables.

    `overrides` replaces fields by name. What equals the child's own default is left out, and None, which always does.
    """
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    # A child's lines are the supervisor's to filter, and its ready line is one of level info.
    log_level = "debug" if settings.log_level == "debug" else "info"
    # Whatever is to be read from files, the supervisor has read.
    environ[FOLDERS_VARIABLE] = ""
    values: Mapping[str, Any] = settings.model_dump(mode="json") | {"log_level": log_level} | overrides
    for name, field in service.model_fields.items():
        value = values[name]
        if value is not None and value != field.default:
            environ[ENV_PREFIX + name.upper()] = value if isinstance(value, str) else json.dumps(value)
    return environ
