"""Certificates between services: who is let in, what one is told who is not, and files that change meanwhile."""

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.credentials import Certificates, Credentials
from protos.watched_files import FileMistakeError
from scheduler_svc.settings import SchedulerSettings
from tests.certificates import Authority, Pair


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def strangers(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "strangers")


async def who(_request: Any, context: Any) -> bytes:
    """Answer with the name in the caller's certificate."""
    names: list[bytes] = context.auth_context().get("x509_common_name", [b"nobody"])
    return names[0]


async def echo(requests: Any, _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


HANDLERS: dict[str, Any] = {
    "who": grpc.unary_unary_rpc_method_handler(who),
    "echo": grpc.stream_stream_rpc_method_handler(echo),
}


@asynccontextmanager
async def serving(certificates: Certificates | None) -> AsyncIterator[str]:
    """Serve; yields HOST:PORT."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
    port = Credentials(certificates=certificates).add_port(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(address: str, certificates: Certificates | None) -> str:
    """Who the server says one is. Raises AioRpcError."""
    # gRPC would hand out a connection of an earlier channel to the same address.
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with Credentials(certificates=certificates).dial(address, options) as channel:
        call: Any = channel.unary_unary("/test/who")
        answer: bytes = await call(b"", timeout=20)
        return answer.decode()


async def refusal(address: str, certificates: Certificates | None) -> str:
    """What one is told who is not let in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, certificates)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return Credentials(certificates=certificates).explain(caught.value.details())


def trusting(authority: Authority, server_name: str = "") -> Certificates:
    """What one has who checks servers and shows nothing."""
    return Certificates("", "", str(authority.certificate), server_name)


def alone(pair: Pair) -> Certificates:
    return Certificates(str(pair.certificate), str(pair.key), "")


async def test_server_tls_lets_in_whoever_trusts_its_authority(ours: Authority, strangers: Authority) -> None:
    async with serving(alone(ours.issue("server"))) as address:
        assert await ask(address, trusting(ours)) == "nobody"
        told = await refusal(address, trusting(strangers))
        assert told.startswith("its certificate is of no authority that this service trusts (--tls-ca)")
        await refusal(address, None)


async def test_one_certificate_without_authority_serves_a_whole_cell(ours: Authority, strangers: Authority) -> None:
    shared = alone(ours.issue("cell"))
    async with serving(shared) as address:
        assert await ask(address, shared) == "nobody"
        await refusal(address, alone(strangers.issue("cell")))


async def test_mutual_tls_lets_in_certificates_of_its_authority_alone(ours: Authority, strangers: Authority) -> None:
    async with serving(ours.issue("server").trusting(ours)) as address:
        assert await ask(address, ours.issue("worker").trusting(ours)) == "worker"
        told = await refusal(address, trusting(ours))
        assert told.startswith("it may not trust this service's certificate")
        await refusal(address, strangers.issue("stranger").trusting(ours))
        await refusal(address, None)


async def test_certificate_of_another_name_is_refused_unless_that_name_is_asked_for(ours: Authority) -> None:
    async with serving(alone(ours.issue("server", "DNS:scheduler.cell"))) as address:
        told = await refusal(address, trusting(ours))
        assert told.startswith("its certificate is for another name (--tls-server-name)")
        assert await ask(address, trusting(ours, "scheduler.cell")) == "nobody"


async def test_server_without_tls_is_named_as_such(ours: Authority) -> None:
    async with serving(None) as address:
        assert (await refusal(address, trusting(ours))).startswith("it does not speak TLS")


async def test_rotation_ends_no_stream_and_counts_for_the_next_connection(tmp_path: Path, ours: Authority) -> None:
    newer = Authority(tmp_path, "newer")
    server, client = ours.issue("server"), ours.issue("client")
    async with (
        serving(server.trusting(ours)) as address,
        Credentials(certificates=client.trusting(ours)).dial(address) as channel,
    ):
        stream: Any = channel.stream_stream("/test/echo")()
        await stream.write(b"before")
        assert await stream.read() == b"before"
        theirs = newer.issue("client").trusting(newer)
        await refusal(address, theirs)
        # Certificate, key and authority, one after the other, under the running server.
        server.become(newer.issue("server"))
        ours.certificate.write_bytes(newer.certificate.read_bytes())
        assert await ask(address, theirs) == "client"
        await stream.write(b"after")
        assert await stream.read() == b"after"
        await stream.done_writing()


async def test_client_reads_its_files_anew_for_each_channel(tmp_path: Path, ours: Authority) -> None:
    newer = Authority(tmp_path, "newer")
    pair = ours.issue("client")
    client = Certificates(str(pair.certificate), str(pair.key), str(ours.certificate))
    async with serving(newer.issue("server").trusting(newer)) as address:
        await refusal(address, client)
        pair.become(newer.issue("renewed"))
        ours.certificate.write_bytes(newer.certificate.read_bytes())
        assert await ask(address, client) == "renewed"


async def test_half_replaced_pair_leaves_the_old_one_in_force(
    ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, newer = ours.issue("server"), ours.issue("newer")
    async with serving(alone(pair)) as address:
        pair.certificate.write_bytes(newer.certificate.read_bytes())
        for _ in range(2):
            assert await ask(address, trusting(ours)) == "nobody"
        assert caplog.text.count("stays in force") == 1
        pair.key.unlink()
        assert await ask(address, trusting(ours)) == "nobody"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("pair.pem", "", ""), "--tls-cert needs --tls-key too"),
        (("", "pair.key", ""), "--tls-key needs --tls-cert too"),
        (("gone.pem", "pair.key", ""), "gone.pem: No such file"),
        (("pair.pem", "gone.key", ""), "gone.key: No such file"),
        (("pair.pem", "other.key", ""), "other.key: does not belong to --tls-cert"),
        (("text.pem", "pair.key", ""), "no certificate and key in PEM"),
        (("pair.pem", "pair.key", "text.pem"), "text.pem: holds no certificate in PEM"),
        (("pair.pem", "locked.key", ""), "locked.key: is encrypted"),
        (("", "", "authority.pem"), "--tls-ca needs --tls-cert and --tls-key too"),
    ],
)
def test_mistake_is_one_line_that_names_the_flag(ours: Authority, files: tuple[str, str, str], words: str) -> None:
    pair = ours.issue("pair")
    ours.issue("other")
    folder = pair.key.parent
    (folder / "text.pem").write_text("no certificate\n")
    lock_key(pair.key, folder / "locked.key")
    cert, key, authority = (str(folder / name) if name else "" for name in files)
    settings = SchedulerSettings(tls_cert=cert, tls_key=key, tls_ca=authority)
    with pytest.raises(FileMistakeError) as caught:
        Credentials.of_server(settings, "127.0.0.1")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def lock_key(key: Path, locked: Path) -> None:
    command = ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
