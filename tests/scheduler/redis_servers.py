"""Real Redis servers on loopback: alone, with a password, with TLS, behind a Sentinel, as a cluster.

They keep nothing on disk, so that a server that is killed and started again is empty.
"""

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

HOST = "127.0.0.1"
TIMEOUT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return as soon as the condition holds; errors of a server that is not there yet do not count."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.01)
    pytest.fail(f"in {TIMEOUT_S:g} s it did not come true: {what}")


class RedisServer:
    """One server process, always at the same port and with the same socket."""

    def __init__(self, folder: Path, *flags: str, config: str = "", **client_options: Any) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is not installed: apt-get install redis-server, or run make test as root")
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.folder = folder
        self.socket_path = folder / "redis.sock"
        self._flags = flags
        self._config = config
        self._client_options = {"port": self.port} | client_options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def start(self) -> None:
        command = ["redis-server"]
        if self._config:
            path = self.folder / "redis.conf"
            path.write_text(self._config)
            command.append(str(path))
        command += ["--bind", HOST, "--dir", str(self.folder), "--save", "", "--appendonly", "no"]
        port_flag = "--tls-port" if "ssl" in self._client_options else "--port"
        # A port of 0 first: the other kind of port has a default.
        command += ["--port", "0", port_flag, str(self.port), "--unixsocket", str(self.socket_path)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._flags], stdout=log, stderr=log)
        wait_until(lambda: bool(self.ask("PING")), f"a Redis server at port {self.port}")

    def ask(self, *command: Any) -> Any:
        """Return a command's answer, undecoded."""
        options: dict[str, Any] = {"host": HOST, "protocol": 2} | self._client_options
        with redis.Redis(**options) as client:
            return client.execute_command(*command)

    def calls(self, command: str) -> int:
        """Return how often the server was given a command."""
        stats = self.ask("INFO", "commandstats").get(f"cmdstat_{command}", {"calls": 0})
        return int(stats["calls"])

    @contextmanager
    def watched(self) -> Iterator[Callable[[], str]]:
        """Yield what returns, call after call, the commands that the server is given from now on, in order."""
        with redis.Redis(host=HOST, protocol=2, **self._client_options) as client, client.monitor() as monitor:
            yield lambda: str(monitor.next_command()["command"])

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Have it accept connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


class RedisServers:
    """Starts servers below one folder; `kill` ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[RedisServer] = []

    def start(self, *flags: str, config: str = "", **client_options: Any) -> RedisServer:
        server = RedisServer(self._folder / str(len(self._servers)), *flags, config=config, **client_options)
        self._servers.append(server)
        server.start()
        return server

    def start_with_tls(self) -> tuple[RedisServer, Path]:
        """Start a server that speaks TLS alone; return it and the file that its certificate can be checked with."""
        certificate, key = make_certificate(self._folder / "certificate")
        flags = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
        return self.start(*flags, ssl=True, ssl_ca_certs=str(certificate)), certificate

    def kill(self) -> None:
        for server in self._servers:
            server.kill()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate of 127.0.0.1; return its file and that of its key."""
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    command += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class SentinelDeployment:
    """A master, a replica, and a Sentinel that promotes the replica when the master is gone."""

    service = "cache"

    def __init__(self, servers: RedisServers) -> None:
        self.master = servers.start()
        self.replica = servers.start("--replicaof", HOST, str(self.master.port))
        config = (
            f"sentinel monitor {self.service} {HOST} {self.master.port} 1\n"
            f"sentinel down-after-milliseconds {self.service} 500\n"
            f"sentinel failover-timeout {self.service} 3000\n"
        )
        self.sentinel = servers.start("--sentinel", config=config)
        wait_until(lambda: self._num_replicas() == 1, "the Sentinel has found the replica")

    @property
    def url(self) -> str:
        return f"redis+sentinel://{HOST}:{self.sentinel.port}/{self.service}"

    def _num_replicas(self) -> int:
        return len(self.sentinel.ask("SENTINEL", "REPLICAS", self.service))


class ClusterDeployment:
    """Three masters without replicas."""

    def __init__(self, servers: RedisServers) -> None:
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes = [servers.start(*flags, "--cluster-port", str(free_port())) for _ in range(3)]
        addresses = [f"{HOST}:{node.port}" for node in self.nodes]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(command, check=True, capture_output=True)
        self.wait_until_complete()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def wait_until_complete(self) -> None:
        is_ok = b"cluster_state:ok"
        wait_until(lambda: all(is_ok in node.ask("CLUSTER", "INFO") for node in self.nodes), "the cluster is complete")
