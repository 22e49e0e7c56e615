"""A cell that `docker compose` runs on a real engine, under a project, port and image tag of its own."""

import json
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.cell import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "scheduler", "worker", "redis")
IMAGES = ("gateway", "scheduler", "worker")
POLL_S = 0.2


def run(*command: str, timeout_s: float = 60, env: dict[str, str] | None = None) -> str:
    """Return what a command prints. Raises AssertionError with all of it when the command fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=env, check=False)
    assert result.returncode == 0, f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout


def engine_answers() -> bool:
    """Return whether there are a Docker engine and Compose."""
    try:
        run("docker", "version", "--format", "{{.Server.Version}}", timeout_s=20)
        run("docker", "compose", "version", timeout_s=20)
    except (OSError, AssertionError, subprocess.TimeoutExpired):
        return False
    return True


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Return as soon as the condition holds. Raises AssertionError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_S)


class Deployment:
    """The containers of one Compose project. Nothing runs before `up`; `remove` takes everything away."""

    def __init__(self) -> None:
        self.project = f"quire-test-{secrets.token_hex(3)}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = os.environ | {
            "COMPOSE_PROJECT_NAME": self.project,
            "QUIRE_TAG": self.project,
            "QUIRE_PORT": str(self.port),
            "QUIRE_KV_CACHE_MEMORY": "256MiB",
            # Three workers share the cores of one machine.
            "QUIRE_NUM_THREADS": "1",
        }

    @contextmanager
    def given(self, **variables: str) -> Iterator[None]:
        """Set variables for the commands in the block, as in the shell of whoever types them."""
        before = self._env
        self._env = before | variables
        try:
            yield
        finally:
            self._env = before

    def compose(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run `docker compose`; return its output."""
        # The settings of whoever runs the tests are not for this cell.
        return run("docker", "compose", "--env-file", "/dev/null", *arguments, timeout_s=timeout_s, env=self._env)

    def up(self, *arguments: str) -> None:
        """Bring up what is not there."""
        self.compose("up", "--detach", "--no-build", *arguments, timeout_s=300)

    def ids(self, service: str) -> list[str]:
        """Return the ids of a service's containers."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what the engine knows of a container."""
        facts: dict[str, Any] = json.loads(run("docker", "inspect", container))[0]
        return facts

    def execute(self, service: str, *command: str, **variables: str) -> str:
        """Run a command in a service's container, with more variables."""
        options = [option for name, value in variables.items() for option in ("--env", f"{name}={value}")]
        return self.compose("exec", "-T", *options, service, *command)

    def prepare(self) -> str:
        """Run what comes before the services once more; return what it says."""
        return self.compose("run", "--rm", "-T", "--no-deps", "prepare")

    def logs(self) -> str:
        """Return the last lines of every container."""
        return self.compose("logs", "--no-color", "--tail", "50")

    def image(self, service: str) -> str:
        """Return the name of a service's image."""
        return f"quire-{service}:{self.project}"

    def image_bytes(self, image: str) -> int:
        """Return the size of an image."""
        return int(run("docker", "image", "inspect", "--format", "{{.Size}}", image))

    def kill_on_host(self, container: str) -> None:
        """Send SIGKILL to a container's process by its process id on the engine's machine, as the kernel would."""
        pid = self.inspect(container)["State"]["Pid"]
        program = f"import os; os.kill({pid}, 9)"
        run(
            *("docker", "run", "--rm", "--pid", "host", "--user", "0", "--network", "none"),
            *("--entrypoint", "python3", self.image("worker"), "-c", program),
        )

    def metric(self, name: str) -> float:
        """Return a figure of the cell without labels of its own; 0 before it is there."""
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        return float(found.group(1)) if found else 0.0

    def is_ready(self) -> bool:
        """Return whether a request would be served."""
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def wait_for_workers(self, count: int, seconds: float = 300) -> None:
        """Wait until so many workers serve."""
        until(lambda: self.metric("quire_workers") == count, f"{count} workers\n{self.logs()}", seconds)

    def down(self) -> None:
        """Stop and remove containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", timeout_s=180)

    def leftovers(self) -> str:
        """Return the names of what is still there of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        return "".join(run("docker", kind, "ls", "--quiet", "--filter", label) for kind in ("volume", "network")) + run(
            "docker", "ps", "--all", "--quiet", "--filter", label
        )

    def remove(self) -> None:
        """Take down whatever is up, and forget the images."""
        self.down()
        run("docker", "image", "rm", "--force", *map(self.image, IMAGES))
        label = f"label=com.docker.compose.project={self.project}"  # two services share an image: one build has no name
        run("docker", "image", "prune", "--force", "--filter", label)


class Load:
    """Clients that ask one after the other, for as long as they are told to."""

    CLIENTS = 4
    OUTPUT_TOKENS = 24

    def __init__(self, url: str, model: str) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url, self._model = url, model
        self._stop = threading.Event()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator["Load"]:
        """Keep asking while the block runs; every request that began has ended after it."""
        with ThreadPoolExecutor(self.CLIENTS) as pool:
            clients: list[Future[None]] = [pool.submit(self._ask, idx) for idx in range(self.CLIENTS)]
            try:
                yield self
            finally:
                self._stop.set()
        for client in clients:
            client.result()

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more requests were answered."""
        goal = self.num_answers + count
        until(lambda: self.num_answers >= goal or bool(self.failures), f"{count} answers", 180)

    def _ask(self, client_idx: int) -> None:
        number = 0
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                number += 1
                failure = self._one(client, f"Story {number} of {client_idx}: once upon a time")
                with self._lock:
                    if failure:
                        self.failures.append(failure)
                    else:
                        self.num_answers += 1

    def _one(self, client: httpx.Client, prompt: str) -> str:
        """Send one request; return what is wrong with its answer, "" when nothing is."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": self.OUTPUT_TOKENS, "ignore_eos": True}
        try:
            answer = client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            return repr(error)
        if answer.status_code != 200:
            return f"status {answer.status_code}: {answer.text}"
        num_tokens = answer.json()["usage"]["completion_tokens"]
        return "" if num_tokens == self.OUTPUT_TOKENS else f"{num_tokens} tokens: {answer.text}"
