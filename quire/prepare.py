"""`python -m quire.prepare`: what must be there before the services start in containers of their own.

It finds the model's folder, fetching or importing it into the cache that the services share, and makes the secrets.
Both reach the services as settings in files (`protos.settings_files`):

    --settings-folder   quire_cluster_token  quire_model  quire_served_model_name    for every service
    --redis-folder      quire_redis_url                                              for the scheduler
                        redis.conf, which holds the password                         for Redis

Secrets that are there stay; the rest is written at every start. Exit code 0, 1 when the model cannot be had, 2 for a
mistake in the flags.
"""

import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from protos.settings import ENV_PREFIX, SettingsMistakeError, read_settings
from quire.serve import StartError, find_model, served_name

_SECRET_BYTES = 32
# Whoever mounts a folder may read it, whatever user the container runs as: so are Docker's own secrets.
_FILE_MODE = 0o444
# Of a model's folder, what services open.
_MODEL_SUFFIXES = (".json", ".jinja", ".safetensors")


class UnreadableModelError(Exception):
    """Services could not read the model; the message is one line that names the file."""


class PrepareSettings(BaseSettings):
    """Flags, or `QUIRE_*` variables with the same names."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        cli_prog_name="python -m quire.prepare",
        cli_kebab_case=True,
        cli_exit_on_error=False,
    )

    model: str = Field("bundled", description="Hugging Face folder, GGUF file, Hub id, or bundled")
    served_model_name: str = Field("", description="name by which clients call the model; empty: its own")
    cluster_token: str = Field("", description="secret of the cell; empty: the one that is there, or a random one")
    settings_folder: Path = Field(Path("/run/quire"), description="where every service finds its settings")
    redis_folder: Path = Field(Path("/run/quire-redis"), description="where the scheduler and Redis find theirs")
    redis_server: str = Field("redis:6379", description="HOST:PORT at which the scheduler reaches Redis")


def write(path: Path, content: str) -> None:
    """Write a file that appears whole or not at all."""
    staging = path.with_name(f".{path.name}.part")
    staging.unlink(missing_ok=True)  # of a start that was cut
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE), "w") as file:
        os.fchmod(file.fileno(), _FILE_MODE)  # whatever the umask is
        file.write(content + "\n")
    staging.rename(path)


def write_secrets(settings: PrepareSettings) -> None:
    """Write the cluster token and what Redis and its client need to know each other, unless they are there."""
    _write_token(settings.settings_folder / "quire_cluster_token", settings.cluster_token)
    url_file, config_file = settings.redis_folder / "quire_redis_url", settings.redis_folder / "redis.conf"
    if not (url_file.is_file() and config_file.is_file()):
        password = secrets.token_hex(_SECRET_BYTES)
        write(config_file, f"requirepass {password}")
        write(url_file, f"redis://:{password}@{settings.redis_server}/0")


def _write_token(token_file: Path, given: str) -> None:
    known = token_file.read_text().strip() if token_file.is_file() else ""
    if known and given in ("", known):
        return
    write(token_file, given or secrets.token_hex(_SECRET_BYTES))
    if known:
        # They read it when they start: one that starts alone, later, would be refused by all others.
        print("the cluster token is another one now: services that run need docker compose up --force-recreate")


def check_readable(folder: Path) -> None:
    """Raise UnreadableModelError when this process's user, as which services run too, cannot read a model's file."""
    # The safetensors library writes files that only their owner can read.
    for path in sorted(folder.iterdir()):
        if path.suffix in _MODEL_SUFFIXES and path.exists() and not os.access(path, os.R_OK):
            raise UnreadableModelError(
                f"cannot read {path}: services run as user {os.getuid()}, so others need the right (chmod -R a+rX)"
            )


def write_model(settings: PrepareSettings) -> None:
    """Write where the model's folder is and how clients call it.

    Raises StartError when there is no such model, UnreadableModelError when there is one that cannot be read.
    """
    folder = asyncio.run(find_model(settings.model))
    check_readable(Path(folder))
    write(settings.settings_folder / "quire_model", folder)
    name = settings.served_model_name or served_name(settings.model)
    write(settings.settings_folder / "quire_served_model_name", name)
    print(f"{name}: {folder}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Prepare; return the exit code."""
    try:
        settings = read_settings(PrepareSettings, argv)
        write_secrets(settings)
        write_model(settings)
    except SettingsMistakeError as error:
        print(f"quire.prepare: {error}", file=sys.stderr)
        return 2
    except (StartError, UnreadableModelError) as error:
        if str(error):  # else the loader has said why
            print(f"quire.prepare: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"quire.prepare: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
