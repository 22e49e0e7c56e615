"""What a service shows its peers and asks of them: the cluster token, and certificates where it has been given some.

    --tls-cert --tls-key            it listens with TLS; whoever dials it checks that certificate
    --tls-cert --tls-key --tls-ca   the same, and whoever dials must show a certificate of that authority (mutual TLS)
    --tls-ca                        for a gateway, which listens to no service: it dials with TLS and shows nothing

Who dials trusts the authority in `--tls-ca`; without one the certificates in its own `--tls-cert`, so that a cell can
share one self-signed certificate, or name its authority at the end of each file. All files are read again when they
have changed: at the next handshake of a server, and for the next channel of a client. Connections that stand are left
alone.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio

from protos.channel import CHANNEL_OPTIONS, require_token_beyond_loopback, token_metadata
from protos.watched_files import FileMistakeError, WatchedFiles, read_file

# What gRPC says when a handshake fails, and what that means.
_MEANINGS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is of no authority that this service trusts (--tls-ca)",
    "Hostname Verification Check failed": "its certificate is for another name (--tls-server-name)",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "Socket closed": "it may not trust this service's certificate",
}


class CredentialSettings(Protocol):
    """The settings that credentials are made of."""

    @property
    def cluster_token(self) -> str:
        """The secret of the cell."""

    @property
    def tls_cert(self) -> str:
        """File of the certificate, with its chain."""

    @property
    def tls_key(self) -> str:
        """File of its key."""

    @property
    def tls_ca(self) -> str:
        """File of the authority."""

    @property
    def tls_server_name(self) -> str:
        """The name that servers' certificates carry."""


@dataclass(frozen=True, slots=True)
class _Pems:
    """Contents of the files; None: there is no such file."""

    certificate: bytes | None
    key: bytes | None
    authority: bytes | None


class Certificates:
    """The files of one service, read again when they change. Raises FileMistakeError when they make no sense."""

    def __init__(self, certificate: str, key: str, authority: str, server_name: str = "") -> None:
        if bool(certificate) != bool(key):
            given, lacking = ("--tls-cert", "--tls-key") if certificate else ("--tls-key", "--tls-cert")
            raise FileMistakeError(f"{given} needs {lacking} too")
        self._certificate, self._key, self._authority = (
            Path(name) if name else None for name in (certificate, key, authority)
        )
        self.server_name = server_name
        paths = [path for path in (self._certificate, self._key, self._authority) if path is not None]
        self._pems = WatchedFiles(paths, self._read)

    @property
    def can_listen(self) -> bool:
        """Whether there is a certificate to show."""
        return self._certificate is not None

    def for_client(self) -> grpc.ChannelCredentials:
        """Return what a channel is opened with now."""
        pems = self._pems.current()
        return grpc.ssl_channel_credentials(pems.authority or pems.certificate, pems.key, pems.certificate)

    def for_server(self) -> grpc.ServerCredentials:
        """Return what a port is opened with; each handshake there looks at the files again."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=self._authority is not None
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        pems = self._pems.current()
        assert pems.key is not None, "a service that listens has a pair"
        assert pems.certificate is not None, "a service that listens has a pair"
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.certificate)], pems.authority)

    def _read(self) -> _Pems:
        certificate, key, authority = (
            read_file(flag, path) if path is not None else None
            for flag, path in (
                ("--tls-cert", self._certificate),
                ("--tls-key", self._key),
                ("--tls-ca", self._authority),
            )
        )
        # gRPC would tell at the first handshake alone, and not why.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self._certificate is not None and self._key is not None:
            _check_pair(context, self._certificate, self._key)
        if self._authority is not None:
            try:
                context.load_verify_locations(self._authority)
            except OSError:  # an SSLError, or the file has gone since it was read
                raise FileMistakeError(f"--tls-ca {self._authority}: holds no certificate in PEM") from None
        return _Pems(certificate, key, authority)


class Credentials:
    """What one service dials its peers with, and lets them in by."""

    def __init__(self, token: str = "", certificates: Certificates | None = None) -> None:
        self.token = token
        self.metadata = token_metadata(token)
        self._certificates = certificates

    @classmethod
    def of_client(cls, settings: CredentialSettings) -> "Credentials":
        """Return those of a service that only dials. Raises FileMistakeError."""
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        return cls(settings.cluster_token, Certificates(*files, settings.tls_server_name) if any(files) else None)

    @classmethod
    def of_server(cls, settings: CredentialSettings, host: str) -> "Credentials":
        """Return those of a service that listens on `host`, too. Raises FileMistakeError and MissingTokenError."""
        require_token_beyond_loopback(host, settings.cluster_token)
        credentials = cls.of_client(settings)
        if credentials._certificates is not None and not credentials._certificates.can_listen:
            raise FileMistakeError("--tls-ca needs --tls-cert and --tls-key too, for a service that listens")
        return credentials

    def dial(self, address: str, options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """Return a new channel to HOST:PORT, with certificates as they are now; calls need `metadata` too."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._certificates.for_client(), options=[*options, *self._name()])

    def dial_blocking(self, address: str) -> grpc.Channel:
        """Return the same for a process without an event loop."""
        options = list(CHANNEL_OPTIONS)
        if self._certificates is None:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._certificates.for_client(), options=[*options, *self._name()])

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Let a server listen on HOST:PORT; return the port. Raises RuntimeError when it cannot be had."""
        if self._certificates is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._certificates.for_server())

    def explain(self, details: str | None) -> str:
        """Return why a call failed, as gRPC says it, with what that means where it is about certificates."""
        details = details or ""
        if self._certificates is None:
            return details
        meaning = next((text for words, text in _MEANINGS.items() if words in details), None)
        return f"{meaning}: {details}" if meaning is not None else details

    def _name(self) -> Sequence[tuple[str, Any]]:
        name = self._certificates.server_name if self._certificates is not None else ""
        return (("grpc.ssl_target_name_override", name),) if name else ()


def _check_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Raise FileMistakeError unless the files hold a certificate and the key that belongs to it."""

    def ask_nobody() -> str:
        raise FileMistakeError(f"--tls-key {key}: is encrypted, and there is nobody to ask for its password")

    try:
        context.load_cert_chain(certificate, key, ask_nobody)
    except OSError as error:  # an SSLError, or a file has gone since it was read
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise FileMistakeError(f"--tls-key {key}: does not belong to --tls-cert {certificate}") from None
        raise FileMistakeError(f"--tls-cert {certificate}, --tls-key {key}: no certificate and key in PEM") from None
