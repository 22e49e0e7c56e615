"""What a Redis URL says. Imports nothing, so that the settings can check a URL without loading the client.

    redis://[user][:password]@host[:port][/db]                  one server
    unix://[user][:password]@/path/of/socket[?db=0]             one server on this machine
    redis+sentinel://[...]@host[:port][,host[:port]...]/service[/db]   the master that Sentinels name
    redis+cluster://[...]@host[:port][,host[:port]...]          a cluster, found from any of its nodes

`rediss` in place of `redis` is TLS; `?ssl_ca_certs=FILE` names the certificates that sign the server's. Sentinels that
have credentials of their own get `?sentinel_username=` and `?sentinel_password=`. A password with special characters is
percent-encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379


class RedisKind(Enum):
    """How the server that takes the writes is found."""

    STANDALONE = ""
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


class MalformedRedisUrlError(ValueError):
    """A URL names no Redis; the message says why, without repeating the password."""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A Redis deployment and how to log in. `hosts` is empty for a socket's `path`."""

    kind: RedisKind = RedisKind.STANDALONE
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    service: str = ""  # what the Sentinels call the master
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    is_tls: bool = False
    ca_file: str | None = None

    def __str__(self) -> str:
        """Return the address for a log line: no credentials."""
        if self.path:
            return f"unix:{self.path}"
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts}/{self.service}" if self.service else hosts


def parse_redis_url(url: str) -> RedisAddress:
    """Return what a URL says. Raises MalformedRedisUrlError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # which repeats the password
        raise MalformedRedisUrlError("it is no URL: special characters of a password are percent-encoded") from None
    protocol, _, kind_name = parts.scheme.partition("+")
    kinds = {kind.value: kind for kind in RedisKind}
    if protocol not in ("redis", "rediss", "unix") or kind_name not in kinds or (protocol == "unix" and kind_name):
        raise MalformedRedisUrlError(
            "it begins with none of redis://, rediss://, unix://, redis+sentinel://, redis+cluster://"
        )
    kind = kinds[kind_name]
    parameters = _parameters(parts, kind)
    login, _, hosts_text = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    segments = [] if protocol == "unix" else [segment for segment in parts.path.split("/") if segment]
    if protocol == "unix" and (hosts_text or not parts.path.startswith("/")):
        raise MalformedRedisUrlError("a socket's URL has three slashes and its path: unix:///run/redis.sock")
    if "@" in "".join(segments):
        raise MalformedRedisUrlError("it has a '/' before its '@': in a password that is written %2F")
    service = segments.pop(0) if kind is RedisKind.SENTINEL and segments else ""
    if kind is RedisKind.SENTINEL and not service:
        raise MalformedRedisUrlError("it lacks the service: redis+sentinel://HOST:PORT/SERVICE")
    db_text = parameters.get("db") or (segments.pop(0) if segments else "0")
    if segments or not (db_text.isascii() and db_text.isdigit()):
        raise MalformedRedisUrlError("the number of the database, the last part of its path, is not a number")
    if kind is RedisKind.CLUSTER and int(db_text):
        raise MalformedRedisUrlError("a cluster has the database 0 alone")
    default_port = _DEFAULT_SENTINEL_PORT if kind is RedisKind.SENTINEL else _DEFAULT_PORT
    hosts = () if protocol == "unix" else tuple(_hosts(hosts_text, default_port))
    if len(hosts) > 1 and kind is RedisKind.STANDALONE:
        raise MalformedRedisUrlError("several hosts need redis+sentinel:// or redis+cluster://")
    return RedisAddress(
        kind=kind,
        hosts=hosts,
        path=unquote(parts.path) if protocol == "unix" else "",
        service=unquote(service),
        db=int(db_text),
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=parameters.get("sentinel_username"),
        sentinel_password=parameters.get("sentinel_password"),
        is_tls=protocol == "rediss",
        ca_file=parameters.get("ssl_ca_certs"),
    )


def _parameters(parts: SplitResult, kind: RedisKind) -> dict[str, str]:
    known = {"db"}
    if parts.scheme.startswith("rediss"):
        known.add("ssl_ca_certs")
    if kind is RedisKind.SENTINEL:
        known |= {"sentinel_username", "sentinel_password"}
    if parts.fragment:
        raise MalformedRedisUrlError("it has a '#': in a password that is written %23")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parameters.keys() - known:  # unnamed: after a bare '?' in a password the name is the password's end
        raise MalformedRedisUrlError(
            f"it has a parameter that is none of {', '.join(sorted(known))}: in a password a '?' is written %3F"
        )
    return parameters


def _hosts(text: str, default_port: int) -> Iterator[tuple[str, int]]:
    for host_text in text.split(","):
        try:
            parts = urlsplit(f"//{host_text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise MalformedRedisUrlError("a port in it is no number from 1 to 65535") from None
        if not host or port == 0:
            raise MalformedRedisUrlError("it lacks a host: redis://HOST:PORT")
        yield host, port or default_port
