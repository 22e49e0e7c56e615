"""`docker compose` on a real engine: up, a chat, more workers under load, a worker and Redis lost, overlays, down.

The tests share one cell and run in this order. Where no engine answers they are skipped, and the summary says so.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy.conftest import NO_ENGINE
from tests.deploy.engine import IMAGES, ROOT, SERVICES, Deployment, Load, engine_answers, run, until
from worker_svc.loader.resolve import bundled_gguf

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


@pytest.fixture(scope="module")
def other_cell(cell: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same cell with a model from a Hub and a token from a secret."""
    token_file = tmp_path_factory.mktemp("secret") / "token"
    token_file.write_text("a token of one's own\n")
    token_file.chmod(0o444)
    files = ("docker-compose.yml", "deploy/compose.secrets.yml", "tests/deploy/compose.hub.yml")
    with cell.given(
        COMPOSE_FILE=":".join(files),
        QUIRE_CLUSTER_TOKEN_FILE=str(token_file),
        QUIRE_MODEL="acme/chat",
        HF_ENDPOINT="http://hub:8080",
    ):
        cell.up("--scale", "worker=1")
        yield cell


@pytest.fixture(scope="module")
def stranger(other_cell: Deployment) -> str:
    """The container of one more worker, with another token. It starts while the cell does."""
    options = ("--detach", "--no-deps", "--env", "QUIRE_CLUSTER_TOKEN=guessed")
    return other_cell.compose("run", *options, "worker").strip()


@pytest.mark.usefixtures("stranger")
def test_model_from_a_hub_answers(other_cell: Deployment) -> None:
    until(other_cell.is_ready, "the cell is ready", 300)
    answer = httpx.post(f"{other_cell.url}/v1/chat/completions", json=QUESTION | {"model": "acme/chat"}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "acme/chat"
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    for service in ("gateway", "worker"):
        assert "models--acme--chat" in other_cell.execute(service, "cat", "/run/quire/quire_model")


def test_worker_with_another_token_is_refused(other_cell: Deployment, stranger: str) -> None:
    refusal = "refuses this worker (UNAUTHENTICATED): the cluster token is missing or wrong"
    until(lambda: refusal in run("sh", "-c", f"docker logs {stranger} 2>&1"), refusal, 60)
    assert other_cell.metric("quire_workers") == 1


def test_token_of_a_secret_counts_before_the_one_that_was_made(other_cell: Deployment) -> None:
    made = other_cell.execute("scheduler", "cat", "/run/quire/quire_cluster_token").strip()
    assert other_cell.execute("scheduler", "cat", "/run/secrets/quire_cluster_token") == "a token of one's own\n"
    health = ("scheduler", "python", "-m", "scheduler_svc.health")
    other_cell.execute(*health)
    with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
        other_cell.execute(*health, QUIRE_CLUSTER_TOKEN=made)


def test_gguf_file_of_the_host_is_found(other_cell: Deployment) -> None:
    file = bundled_gguf()
    with other_cell.given(QUIRE_MODELS=str(file.parent), QUIRE_MODEL=f"/models/{file.name}"):
        assert f"{file.stem}: /home/quire/.cache/quire/models/" in other_cell.prepare()


def test_model_that_services_cannot_read_is_named(other_cell: Deployment, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    message = r"cannot read /models/model\.safetensors: services run as user 10001"
    with (
        other_cell.given(QUIRE_MODELS=str(tmp_path), QUIRE_MODEL="/models"),
        pytest.raises(AssertionError, match=message),
    ):
        other_cell.prepare()


def test_gpu_overlay_and_a_second_gpu_as_the_readme_adds_it(cell: Deployment, tmp_path: Path) -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (second_gpu,) = (example for example in examples if "worker-1:" in example)
    (tmp_path / "second.yml").write_text(second_gpu)
    files = ("docker-compose.yml", "deploy/compose.gpu.yml", str(tmp_path / "second.yml"))
    options = [option for file in files for option in ("--file", file)]
    services = json.loads(cell.compose(*options, "config", "--format", "json"))["services"]
    for service, device_id in (("worker", "0"), ("worker-1", "1")):
        assert services[service]["image"].startswith("quire-worker-gpu")
        assert services[service]["build"]["target"] == "worker-gpu"
        assert services[service]["environment"]["QUIRE_DEVICE"] == "cuda"
        (device,) = services[service]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"]) == ("nvidia", [device_id])


def test_down_leaves_nothing(cell: Deployment) -> None:
    cell.down()
    assert cell.leftovers() == ""
