"""The health checks of the containers: exit code 0 only when the service answers, and with the token it knows."""

import asyncio
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.cell import free_port
from protos.channel import Refusals
from protos.credentials import Credentials
from scheduler_svc.server import SchedulerServer
from scheduler_svc.settings import SchedulerSettings
from tests.certificates import Authority
from tests.deploy.engine import ROOT
from tests.worker.fakes import make_runner
from worker_svc.fence import StepFence
from worker_svc.service import WorkerService, start_server

TOKEN = "secret"


@pytest.fixture
async def ports() -> AsyncIterator[dict[str, int]]:
    """Ports of a scheduler and a worker, by module."""
    scheduler = SchedulerServer(SchedulerSettings(scheduler_port=0, cluster_token=TOKEN))
    address = await scheduler.start()
    with ThreadPoolExecutor(1) as device:
        service = WorkerService("worker", StepFence(make_runner(), device, lambda _fault: None))
        worker, worker_port = await start_server(service, "127.0.0.1", 0, Credentials(TOKEN), Refusals())
        yield {"scheduler_svc": int(address.rpartition(":")[2]), "worker_svc": worker_port}
        await worker.stop(None)
    await scheduler.stop()


async def check(module: str, port: int, token: str, **settings: str) -> tuple[int | None, str]:
    """Run a health check; return its exit code and what it says."""
    name = module.removesuffix("_svc").upper()
    variables = {f"QUIRE_{name}_PORT": str(port), "QUIRE_CLUSTER_TOKEN": token, "QUIRE_HOST": "0.0.0.0"}
    variables |= {f"QUIRE_{name.upper()}": value for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"{module}.health"), env=variables, cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    said = (await process.communicate())[1].decode()
    return process.returncode, said


@pytest.mark.parametrize("module", ["scheduler_svc", "worker_svc"])
async def test_health_follows_the_service(ports: dict[str, int], module: str) -> None:
    assert await check(module, ports[module], TOKEN) == (0, "")
    code, said = await check(module, ports[module], "guessed")
    assert (code, said.count("\n")) == (1, 1)
    assert "UNAUTHENTICATED" in said
    code, said = await check(module, free_port(), TOKEN)
    assert (code, said.count("\n")) == (1, 1)
    assert "UNAVAILABLE" in said


async def test_health_check_of_a_scheduler_in_mutual_tls_shows_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    flags = authority.issue("scheduler").flags(authority)
    scheduler = SchedulerServer(SchedulerSettings(scheduler_port=0, cluster_token=TOKEN, **flags))
    port = int((await scheduler.start()).rpartition(":")[2])
    assert await check("scheduler_svc", port, TOKEN, **flags) == (0, "")
    code, said = await check("scheduler_svc", port, TOKEN)
    assert (code, "UNAVAILABLE" in said) == (1, True)
    code, said = await check("scheduler_svc", port, TOKEN, **(flags | {"tls_key": "/no/key"}))
    assert (code, said) == (1, "error: --tls-key /no/key: No such file or directory\n")
    await scheduler.stop()
