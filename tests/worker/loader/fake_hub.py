"""A Hugging Face Hub in miniature: one repository, its look-up, its file list and its files.

Tests start it in their own process, on 127.0.0.1. In a container it is a command:
`python -m tests.worker.loader.fake_hub OWNER/NAME FOLDER PORT`.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class FakeHub:
    """What the hub holds, and what was fetched from it."""

    repo_id: str
    files: Mapping[str, bytes]
    gated: bool = False
    url: str = ""
    fetched: set[str] = field(default_factory=set)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` at `hub.url` until the block ends."""

    server = _server(hub, "127.0.0.1", 0)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _server(hub: FakeHub, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(_Handler):
        pass

    Handler.hub = hub
    return ThreadingHTTPServer((host, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, with_body: bool) -> None:
        hub, path = self.hub, self.path.split("?")[0]
        api, resolve = f"/api/models/{hub.repo_id}", f"/{hub.repo_id}/resolve/{COMMIT}/"
        if path in (api, f"{api}/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send_json({"id": hub.repo_id, "sha": COMMIT, "siblings": siblings}, with_body)
        elif path.startswith(f"{api}/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in hub.files.items()
            ]
            self._send_json(files, with_body)
        elif path.startswith(resolve) and hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        elif path.startswith(resolve):
            name = path.removeprefix(resolve)
            if with_body:
                hub.fetched.add(name)
            data = hub.files[name]
            self._send(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}, with_body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _send_json(self, value: Any, with_body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


if __name__ == "__main__":
    repo_id, folder, port = sys.argv[1:]
    files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    _server(FakeHub(repo_id, files), "0.0.0.0", int(port)).serve_forever()
