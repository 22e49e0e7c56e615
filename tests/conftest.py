"""What all tests share: no network, and no settings from outside."""

import contextlib
import os

from tests.interpreted import import_interpreted

# Hub clients must fail at once rather than reach out, in child processes too.
os.environ["HF_HUB_OFFLINE"] = "1"
# Flags that the person who runs the tests has set for their own cells must not reach the ones under test.
for name in [name for name in os.environ if name.upper().startswith("QUIRE_")]:
    del os.environ[name]
os.environ["QUIRE_SETTINGS_FOLDERS"] = ""

# Here, before any other package imports Triton to compile; there is none to import where there is no Linux.
with contextlib.suppress(ModuleNotFoundError):
    import_interpreted("triton.language")
