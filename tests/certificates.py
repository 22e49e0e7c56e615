"""Certificate authorities that `openssl` makes, and certificates of 127.0.0.1 that they issue."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.credentials import Certificates

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and of its key."""

    certificate: Path
    key: Path

    def trusting(self, authority: "Authority") -> Certificates:
        """What a service with this pair has in mutual TLS."""
        return Certificates(str(self.certificate), str(self.key), str(authority.certificate))

    def flags(self, authority: "Authority | None" = None) -> dict[str, Any]:
        """The settings of a service with this pair."""
        pair = {"tls_cert": str(self.certificate), "tls_key": str(self.key)}
        return pair | ({"tls_ca": str(authority.certificate)} if authority is not None else {})

    def become(self, other: "Pair") -> None:
        """Let another pair take this one's place, as tools that renew certificates do: each file at once, in turn."""
        for mine, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            staging = mine.with_suffix(".new")
            staging.write_bytes(theirs.read_bytes())
            os.replace(staging, mine)


class Authority:
    """One that signs certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = self._folder / "authority.key"
        self.certificate = self._folder / "authority.pem"
        request = ("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}")
        _openssl(*request, "-keyout", self._key, "-out", self.certificate)

    def issue(self, name: str, alternative: str = "IP:127.0.0.1") -> Pair:
        """Make a certificate of `name`, good for the alternative name."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request = self._folder / f"{name}.csr"
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}")
        _openssl("req", *_NEW_KEY, *subject, "-keyout", pair.key, "-out", request)
        signing = ("-CA", self.certificate, "-CAkey", self._key, "-days", "2", "-copy_extensions", "copy")
        _openssl("x509", "-req", "-in", request, *signing, "-out", pair.certificate)
        return pair


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
