"""API keys, of which only hashes are kept: lines `TENANT:SHA256`, in a file or a variable.

Keys are 256 random bits (`quire key`), so nobody finds one by trying what people choose, and a plain SHA-256 is enough:
the slow, salted hashes that passwords need would cost each request milliseconds and protect nothing more.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from protos.watched_files import FileMistakeError, WatchedFiles, read_file

KEY_PREFIX = "sk-quire-"
_KEY_BYTES = 32
_TENANT = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class KeyHash:
    """One key: whose it is, and its SHA-256."""

    tenant: str
    digest: bytes

    def line(self) -> str:
        """Return what stands for it in a file."""
        return f"{self.tenant}:{self.digest.hex()}"


def digest_of(key: str) -> bytes:
    """Return what is kept of a key: 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def draw_key(tenant: str) -> tuple[str, KeyHash]:
    """Return a new key and what is kept of it. Raises ValueError for a name that no tenant may have."""
    check_tenant(tenant)
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, KeyHash(tenant, digest_of(key))


def check_tenant(tenant: str) -> None:
    """Raise ValueError for a name that no tenant may have."""
    if not _TENANT.fullmatch(tenant):
        raise ValueError(f"{tenant!r} is no tenant's name: letters, digits and . _ @ + - make one, up to 128 of them")


def parse_keys(text: str) -> list[KeyHash]:
    """Return the keys of lines, or of entries with commas between them; blank ones and comments (#) do not count.

    Raises ValueError, which names the entry by its number and shows nothing of it: it may be a key.
    """
    entries = [entry for line in text.splitlines() for entry in line.partition("#")[0].split(",")]
    keys = []
    for number, entry in enumerate(filter(None, map(str.strip, entries)), start=1):
        tenant, _, digest = entry.partition(":")
        if not (_TENANT.fullmatch(tenant) and _DIGEST.fullmatch(digest)):
            raise ValueError(f"entry {number} is not TENANT:SHA256, with 64 hexadecimal digits (quire key makes one)")
        keys.append(KeyHash(tenant, bytes.fromhex(digest)))
    return keys


class ApiKeys:
    """The keys of a variable and of a file, which is read again when it changes. Raises FileMistakeError."""

    def __init__(self, variable: str, file: str) -> None:
        try:
            self._fixed = parse_keys(variable)
        except ValueError as error:
            raise FileMistakeError(f"QUIRE_API_KEYS: {error}") from None
        self._path = Path(file)
        self._watched = WatchedFiles([self._path], self._read) if file else None

    def tenant_of(self, key: str) -> str | None:
        """Return whose key it is; None for one that is not known.

        Every hash is compared, and each in full, so that the time it takes tells nothing.
        """
        digest, tenant = digest_of(key), None
        for known in (*self._fixed, *(self._watched.current() if self._watched is not None else ())):
            if hmac.compare_digest(known.digest, digest):
                tenant = known.tenant
        return tenant

    def _read(self) -> list[KeyHash]:
        try:
            return parse_keys(read_file("--api-keys-file", self._path).decode())
        except ValueError as error:  # UnicodeDecodeError is one
            reason = "is not text" if isinstance(error, UnicodeDecodeError) else error
            raise FileMistakeError(f"--api-keys-file {self._path}: {reason}") from None
