"""Every form of a Redis URL is read, and a mistake is told without the password."""

import pytest

from scheduler_svc.index.redis_url import MalformedRedisUrlError, RedisAddress, RedisKind, parse_redis_url


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", RedisAddress(hosts=(("cache", 6379),))),
        ("redis://cache:7000/2", RedisAddress(hosts=(("cache", 7000),), db=2)),
        ("redis://cache?db=2", RedisAddress(hosts=(("cache", 6379),), db=2)),
        ("redis://[::1]:7000", RedisAddress(hosts=(("::1", 7000),))),
        ("redis://:p%40ss@cache", RedisAddress(hosts=(("cache", 6379),), password="p@ss")),
        ("redis://me:pass@cache", RedisAddress(hosts=(("cache", 6379),), username="me", password="pass")),
        ("rediss://cache", RedisAddress(hosts=(("cache", 6379),), is_tls=True)),
        (
            "rediss://cache?ssl_ca_certs=/etc/ca.pem",
            RedisAddress(hosts=(("cache", 6379),), is_tls=True, ca_file="/etc/ca.pem"),
        ),
        ("unix:///run/redis.sock", RedisAddress(path="/run/redis.sock")),
        ("unix://:pass@/run/redis.sock?db=1", RedisAddress(path="/run/redis.sock", db=1, password="pass")),
        (
            "redis+sentinel://one,two:7001/cache/3?sentinel_password=s",
            RedisAddress(
                kind=RedisKind.SENTINEL,
                hosts=(("one", 26379), ("two", 7001)),
                service="cache",
                db=3,
                sentinel_password="s",
            ),
        ),
        (
            "rediss+cluster://:pass@one:7000,two:7001",
            RedisAddress(kind=RedisKind.CLUSTER, hosts=(("one", 7000), ("two", 7001)), password="pass", is_tls=True),
        ),
    ],
)
def test_url_is_read(url: str, address: RedisAddress) -> None:
    assert parse_redis_url(url) == address


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://:secret@cache", "begins with none of redis://"),
        ("cache:6379", "begins with none of redis://"),
        ("unix+cluster://:secret@/run/redis.sock", "begins with none of redis://"),
        ("redis://", "lacks a host"),
        ("redis://:secret@", "lacks a host"),
        ("redis://:secret@cache:port", "port"),
        ("redis://:secret@cache:70000", "port"),
        ("redis://:secret@cache/first", "number of the database"),
        ("redis://:secret@cache/1/2", "number of the database"),
        ("redis://:secret@one,two", "several hosts"),
        ("redis://:se#cret@cache", "%23"),
        ("redis://:sec\u2100secret@cache", "percent-encoded"),
        ("redis://:[secret@cache", "percent-encoded"),
        ("redis://:se?secret@cache", "%3F"),
        ("redis+sentinel://me:12/secret@one", "%2F"),
        ("redis+sentinel://one/cache?sentinel_password=se&secret", "a parameter that is none of db, sentinel_p"),
        ("redis://:secret@cache?ssl_ca_certs=/etc/ca.pem", "a parameter that is none of db:"),
        ("redis://:secret@cache?timeout=3", "a parameter that is none of db:"),
        ("unix://run/redis.sock", "three slashes"),
        ("redis+sentinel://:secret@one", "lacks the service"),
        ("redis+cluster://:secret@one/1", "database 0"),
    ],
)
def test_mistake_is_named_without_the_password(url: str, reason: str) -> None:
    with pytest.raises(MalformedRedisUrlError, match=reason) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value)


def test_address_is_shown_without_credentials() -> None:
    assert str(parse_redis_url("redis+sentinel://me:secret@one,two/cache")) == "one:26379,two:26379/cache"
    assert "secret" not in repr(parse_redis_url("redis://me:secret@one"))
