"""The cache of imported GGUF files: each becomes a Hugging Face model folder, once.

The folder is named by the file's contents and the version of the import, so that the same file is never imported
twice, wherever it lies, and a better import never meets an older one's result. It appears complete or not at all: it
is written under another name and renamed. A lock keeps two processes from doing the same work at once.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from worker_svc.loader.errors import GgufError, ModelError
from worker_svc.loader.fingerprint import file_digest

# Raise it with every change of what an import writes.
IMPORT_VERSION = 1

_MAGIC = b"GGUF"

# Files from this size on take seconds to hash, at every start: then say so.
_SLOW_TO_HASH_BYTES = 2 * 1024**3


def models_cache() -> Path:
    """Return where imported models are kept: `$XDG_CACHE_HOME/quire/models`, or `~/.cache/quire/models`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return root / "quire" / "models"


def import_gguf(path: Path, progress: Callable[[str], None]) -> Path:
    """Return the model folder made from the GGUF file at `path`, making it unless the cache has it.

    `progress` is given one line a step. Raises ModelError when the file is damaged or not supported, or the cache
    cannot be written.
    """
    _check_magic(path)
    if path.stat().st_size >= _SLOW_TO_HASH_BYTES:
        progress(f"reading {path.name}, {path.stat().st_size / 1e9:.1f} GB, to see whether it was imported before")
    folder = models_cache() / f"{file_digest(path).hex()[:32]}-v{IMPORT_VERSION}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, progress):
            if not folder.is_dir():
                _import_into(folder, path, progress)
    except OSError as error:
        reason = error.strerror or str(error)
        raise GgufError(f"cannot write the imported model to {folder}: {reason} (XDG_CACHE_HOME moves it)") from error
    return folder


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ModelError(f"neither a model folder nor a GGUF file: {path}")


@contextlib.contextmanager
def _lock(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the one right to make `folder`. The system takes it back from a process that dies."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that imports the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import_into(folder: Path, path: Path, progress: Callable[[str], None]) -> None:
    from worker_svc.loader.gguf_convert import convert  # brings torch, which a model in the cache does not need

    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)  # of an import that was killed: whoever holds the lock is alone
    staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.part")
    staging.mkdir()
    try:
        convert(path, staging, progress)
        for written in staging.iterdir():
            _settle(written)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"imported {path.name} into {folder}")


def _settle(path: Path) -> None:
    """Make a file readable for whoever shares the cache, and force it to disk.

    A power cut soon after the rename would otherwise leave a folder that only looks complete.
    """
    path.chmod(0o644)  # the safetensors library writes files that only their owner can read
    with path.open("rb") as file:
        os.fsync(file.fileno())
