"""`docker compose` on a real engine: up, a chat, more workers under load, a worker and Redis lost, down.

The tests share one cell and run in this order. Where no engine answers they are skipped, and the summary says so.
"""

import time
from collections.abc import Iterator

import httpx
import pytest

from tests.deploy.conftest import NO_ENGINE
from tests.deploy.engine import IMAGES, SERVICES, Deployment, Load, engine_answers, run, until

# More than the limits of all that the first test's fixture waits for, together.
pytestmark = pytest.mark.timeout(2400)

MODEL = "SmolLM2-135M-Instruct"
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def cell(figures: list[str]) -> Iterator[Deployment]:
    """A cell with one worker that has given its first answer."""
    if not engine_answers():
        pytest.skip(NO_ENGINE)
    deployment = Deployment()
    try:
        begin_s = time.monotonic()
        deployment.compose("build", timeout_s=600)
        built_s = time.monotonic()
        deployment.up()
        until(deployment.is_ready, "the cell is ready", 300)
        answer = httpx.post(f"{deployment.url}/v1/chat/completions", json=QUESTION, timeout=60)
        answered_s = time.monotonic()
        assert answer.status_code == 200, answer.text
        figures.append(
            f"from nothing to the first answer: {answered_s - begin_s:.0f} s, of which {built_s - begin_s:.0f} s built "
            "the images"
        )
        sizes = ", ".join(f"{name} {deployment.image_bytes(deployment.image(name)) / 1e6:.0f} MB" for name in IMAGES)
        figures.append(f"images, each with the Python image that they share: {sizes}")
        yield deployment
    except BaseException:
        print(deployment.logs())
        raise
    finally:
        deployment.remove()


def test_chat_answers(cell: Deployment) -> None:
    answer = httpx.post(f"{cell.url}/v1/chat/completions", json=QUESTION, timeout=60).json()
    assert answer["model"] == MODEL
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_every_service_becomes_healthy(cell: Deployment) -> None:
    def health_of(service: str) -> str:
        return str(cell.inspect(cell.ids(service)[0])["State"]["Health"]["Status"])

    for service in SERVICES:
        until(lambda service=service: health_of(service) == "healthy", f"{service} is healthy", 60)  # type: ignore[misc]


def test_only_the_gateway_is_published(cell: Deployment) -> None:
    for service in SERVICES:
        ports = cell.inspect(cell.ids(service)[0])["NetworkSettings"]["Ports"]
        published = [binding for bindings in ports.values() for binding in bindings or []]
        expected = [{"HostIp": "127.0.0.1", "HostPort": str(cell.port)}] if service == "gateway" else []
        assert published == expected, service


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_runs_as_root_or_may_write_its_image(cell: Deployment, service: str) -> None:
    assert cell.execute(service, "id", "-u").strip() != "0"
    host = cell.inspect(cell.ids(service)[0])["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_image_has_no_torch_and_no_build_tools(cell: Deployment, service: str) -> None:
    program = "import importlib.util as u; print([n for n in ('torch', 'numba', 'pip', 'gguf') if u.find_spec(n)])"
    assert cell.execute(service, "python", "-c", program).strip() == "[]"


def test_call_with_another_token_is_refused(cell: Deployment) -> None:
    for service, module in (("scheduler", "scheduler_svc.health"), ("worker", "worker_svc.health")):
        cell.execute(service, "python", "-m", module)
        with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
            cell.execute(service, "python", "-m", module, QUIRE_CLUSTER_TOKEN="guessed")


def test_secrets_are_where_they_are_needed_and_nowhere_else(cell: Deployment) -> None:
    token = cell.execute("worker", "cat", "/run/quire/quire_cluster_token").strip()
    config = cell.execute("redis", "cat", "/run/secrets/redis.conf").strip()
    password = config.removeprefix("requirepass ")
    assert len(token) == len(password) == 64
    for service in SERVICES:
        container = cell.ids(service)[0]
        shown = str(cell.inspect(container)) + run("docker", "top", container, "-eo", "pid,args")
        assert token not in shown
        assert password not in shown
    for service in ("gateway", "worker"):
        found = cell.execute(
            service, "sh", "-c", "cat /run/quire/* /run/quire-redis/* /run/secrets/* 2>/dev/null || true"
        )
        assert token in found
        assert password not in found


def test_redis_asks_for_its_password(cell: Deployment) -> None:
    assert "NOAUTH" in cell.execute("redis", "redis-cli", "ping")


def test_scaling_from_1_to_3_workers_fails_no_request(cell: Deployment, figures: list[str]) -> None:
    load = Load(cell.url, MODEL)
    with load.running():
        load.wait_for_answers(4)
        begin_s = time.monotonic()
        cell.up("--no-recreate", "--scale", "worker=3")
        cell.wait_for_workers(3)
        scaled_s = time.monotonic() - begin_s
        load.wait_for_answers(12)
    assert load.failures == []
    figures.append(f"scale 1 -> 3 workers under load: {scaled_s:.0f} s, {load.num_answers} requests, 0 failed")


def test_killed_worker_comes_back_and_fails_no_request(cell: Deployment, figures: list[str]) -> None:
    load = Load(cell.url, MODEL)
    victim = cell.ids("worker")[0]
    with load.running():
        load.wait_for_answers(4)
        begin_s = time.monotonic()
        cell.kill_on_host(victim)
        until(lambda: cell.metric("quire_worker_losses_total") == 1, "the scheduler sees the loss", 30)
        cell.wait_for_workers(3)
        back_s = time.monotonic() - begin_s
        load.wait_for_answers(4)
    assert load.failures == []
    assert cell.inspect(victim)["RestartCount"] == 1
    figures.append(
        f"a worker killed on the host under load: back in {back_s:.0f} s, {load.num_answers} requests, 0 failed"
    )


def test_restart_of_redis_fails_no_request_and_keeps_what_was_written(cell: Deployment, figures: list[str]) -> None:
    def redis(command: str) -> str:
        password = "$(sed -n 's/^requirepass //p' /run/secrets/redis.conf)"
        return cell.execute("redis", "sh", "-c", f"REDISCLI_AUTH={password} redis-cli {command}").strip()

    load = Load(cell.url, MODEL)
    with load.running():
        load.wait_for_answers(4)
        assert redis("set written-before 1") == "OK"
        cell.compose("restart", "redis")
        until(lambda: redis("get written-before") == "1", "Redis has what was written", 30)
        load.wait_for_answers(8)
    assert load.failures == []
    figures.append(f"Redis restarted under load: {load.num_answers} requests, 0 failed")


def test_gpu_overlay_fits_the_file_that_it_overlays(cell: Deployment) -> None:
    cell.compose("--file", "docker-compose.yml", "--file", "deploy/compose.gpu.yml", "config", "--quiet")


def test_down_leaves_nothing(cell: Deployment) -> None:
    cell.down()
    assert cell.leftovers() == ""
