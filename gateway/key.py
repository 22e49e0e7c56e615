"""`quire key TENANT`: draws an API key. Only whoever runs it ever sees it: gateways keep its hash.

Standard output gets the key, standard error the line for the gateways' file, unless `--add` puts it there itself.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from gateway.api_keys import KeyHash, check_tenant, draw_key
from protos.settings import SettingsMistakeError, read_settings


def _checked(tenant: str) -> str:
    check_tenant(tenant)
    return tenant


class KeySettings(BaseSettings):
    """Draw an API key for a tenant: it is printed once, and only its hash is kept."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_KEY_", frozen=True, cli_prog_name="quire key", cli_kebab_case=True, cli_exit_on_error=False
    )

    tenant: CliPositionalArg[Annotated[str, AfterValidator(_checked)]] = Field(description="whose key it is")
    add: str = Field(
        "", description="file of API keys to add the hash to; made if it is not there; empty: show the line"
    )


def add_to_file(path: Path, key: KeyHash) -> None:
    """Put a key's line at the end of a file; gateways that watch it let the key in from then on. Raises OSError."""
    text = path.read_text() if path.exists() else ""
    begin = "\n" if text and not text.endswith("\n") else ""
    with path.open("a") as file:
        file.write(f"{begin}{key.line()}\n")  # one write: a gateway may be reading


def main(arguments: Sequence[str]) -> int:
    """Draw a key; return the exit code."""
    try:
        settings = read_settings(KeySettings, arguments)
        key, kept = draw_key(settings.tenant)
        if settings.add:
            add_to_file(Path(settings.add), kept)
        else:
            print(kept.line(), file=sys.stderr)
    except SettingsMistakeError as error:
        print(f"quire key: {error} (quire key --help shows every flag)", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"quire key: cannot write {settings.add}: {error.strerror}", file=sys.stderr)
        return 1
    print(key)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
