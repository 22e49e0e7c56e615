"""`quire chat`: what it reads from its surroundings, and servers that leave in the middle."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from protos.settings import read_settings
from quire.chat import ChatError, ChatSettings, answer

EVENT = b'data: {"choices": [{"delta": {"content": "Once"}}]}\n\ndata: {"cho'
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(EVENT), EVENT)


def test_variables_of_other_programs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("URL", "http://elsewhere")
    monkeypatch.setenv("MODEL", "another")
    monkeypatch.setenv("QUIRE_CHAT_SYSTEM", "Be short.")
    settings = read_settings(ChatSettings, [])
    assert (settings.url, settings.model, settings.system) == ("http://localhost:8000", "", "Be short.")


@contextmanager
def server_that_leaves(after: bytes) -> Iterator[ChatSettings]:
    """Settings for a server that answers one request with `after` and closes the connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            request = b""
            while not request.endswith(b"}"):  # its body comes behind its headers
                request += connection.recv(65536)
            connection.sendall(after)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve)
        thread.start()
        yield read_settings(ChatSettings, ["--url", f"http://127.0.0.1:{listener.getsockname()[1]}"])
        thread.join()


def test_answer_that_breaks_off_is_one_line_behind_what_came() -> None:
    with server_that_leaves(BEGUN) as settings:
        pieces = answer(settings, "model", [])
        assert next(pieces) == "Once"
        with pytest.raises(ChatError, match="stopped in the middle of its answer"):
            next(pieces)


def test_server_that_leaves_before_it_answers_is_one_line() -> None:
    with server_that_leaves(b"") as settings, pytest.raises(ChatError, match="closed connection without response"):
        next(answer(settings, "model", []))
