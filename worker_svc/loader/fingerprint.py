"""A model's fingerprint: two folders with equal config and weights files have the same one, wherever they lie.

It names the model on the wire and goes into every block hash: cached KV of one model is never taken for another's.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker_svc.loader.errors import ModelError
from worker_svc.loader.folder import CONFIG_FILE, weight_paths

_DOMAIN = b"quire model fingerprint 1\0"


def fingerprint(folder: Path) -> bytes:
    """Return the SHA-256 (32 bytes) over names and contents of `config.json` and the weights files of `folder`.

    Reads every byte of the weights; shards are hashed in parallel. Raises ModelError when a file is missing.
    """
    # Tokenizer files are left out: KV is a function of token ids, config and weights.
    paths = [folder / CONFIG_FILE, *weight_paths(folder)]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(file_digest, paths))
    total = hashlib.sha256(_DOMAIN)
    for path, digest in zip(paths, digests, strict=True):
        # Digests have a fixed length, so that no two lists of files run together to the same bytes.
        total.update(hashlib.sha256(path.name.encode()).digest() + digest)
    return total.digest()


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 (32 bytes) of a file's contents. Raises ModelError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
