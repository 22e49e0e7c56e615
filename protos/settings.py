"""How every service reads its settings: flags, `QUIRE_*` variables, or files of those names. Imports nothing heavy."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from protos.settings_files import settings_folders

ENV_PREFIX = "QUIRE_"
LOG_LEVELS = ("debug", "info", "warning", "error")

# What every service says of its certificates (protos/credentials.py).
TlsCert = Annotated[
    str,
    Field(
        description="file with the certificate, in PEM with its chain, that this service shows other services; read "
        "again when it changes; empty: no TLS"
    ),
]
TlsKey = Annotated[str, Field(description="file with the key of --tls-cert, in PEM")]
TlsCa = Annotated[
    str,
    Field(
        description="file with the authority, in PEM, whose certificates other services must show; empty: none must, "
        "and where this service dials it trusts the certificates in its own --tls-cert"
    ),
]
TlsServerName = Annotated[
    str,
    Field(
        description="name that other services' certificates carry, whatever their address is; empty: the host that is "
        "dialed"
    ),
]

Settings = TypeVar("Settings", bound=BaseSettings)


class SettingsMistakeError(Exception):
    """A flag or variable is wrong; the message is one line that names it."""


class ServiceSettings(BaseSettings):
    """The frozen settings of one process. A subclass adds fields, among them `log_level`, and its `cli_prog_name`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        secrets_dir=settings_folders(),
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
    )

    @field_validator("log_level", mode="before", check_fields=False)
    @classmethod
    def _check_log_level(cls, value: object) -> str:
        level = str(value).lower()
        if level not in LOG_LEVELS:
            raise ValueError(f"{value} is none of {', '.join(LOG_LEVELS)}")
        return level


def read_settings(settings: type[Settings], arguments: Sequence[str]) -> Settings:
    """Return settings from flags, and from variables where the class has a prefix. Raises SettingsMistakeError."""
    try:
        return CliApp.run(settings, cli_args=list(arguments))
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{'-'.join(str(part) for part in first['loc']).replace('_', '-')}: " if first["loc"] else ""
        raise SettingsMistakeError(f"{flag}{first['msg'].removeprefix('Value error, ')}") from None
    except SettingsError as error:
        raise SettingsMistakeError(_reason(error)) from None


def _reason(error: SettingsError) -> str:
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.filename:  # a setting's file, such as a secret that others may not read
        return f"cannot read {cause.filename}: {cause.strerror}"
    return " ".join(str(error).split())
