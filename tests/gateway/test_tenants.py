"""Through the API, a real scheduler and mutual TLS: whose prefixes a request may share."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from gateway.settings import GatewaySettings
from protos import scheduler_pb2
from protos.credentials import Credentials
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.certificates import Authority
from tests.gateway.fakes import running_gateway, until_ready
from tests.scheduler.conftest import LoopbackCell

TOKEN = "secret"
PROMPT = list(range(10, 60))  # three full blocks of 16, and a tail
NUM_CACHED = 48


class Api:
    """A gateway's API, as clients see it."""

    def __init__(self, http: httpx.AsyncClient, scheduler: str) -> None:
        self.http = http
        self.scheduler = scheduler  # HOST:PORT

    async def num_cached(self, tenant: str, **fields: Any) -> int:
        """Send the prompt; return how many of its tokens were cached."""
        body = {"prompt": PROMPT, "max_tokens": 4} | fields
        response = await self.http.post("/v1/completions", json=body, headers={"X-Quire-Tenant": tenant})
        return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async def refused(self, reason: str) -> float:
        """How many calls the metrics say were refused for a reason."""
        begin = f'quire_refused_calls_total{{model_name="fake",reason="{reason}"}} '
        (line,) = [line for line in (await self.http.get("/metrics")).text.splitlines() if line.startswith(begin)]
        return float(line.removeprefix(begin))


@asynccontextmanager
async def serving(folder: Path, authority: Authority, **settings: Any) -> AsyncIterator[Api]:
    """A real gateway and scheduler, and a worker without a model, in mutual TLS; `settings` are the scheduler's."""
    async with AsyncExitStack() as stack:
        cell = LoopbackCell()
        flags = authority.issue("scheduler").flags(authority)
        await cell.start(cluster_token=TOKEN, **flags, **settings)
        stack.push_async_callback(cell.stop)
        await cell.add_worker(token=TOKEN, certificates=authority.issue("worker").trusting(authority))
        flags = authority.issue("gateway").flags(authority)
        chosen = GatewaySettings(model=str(folder), scheduler=cell.address, cluster_token=TOKEN, **flags)
        _gateway, url = await stack.enter_async_context(running_gateway(chosen))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
        await until_ready(http)
        yield Api(http, cell.address)
    cell.check()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def test_tenants_never_share_prefixes_by_default(model_folder: Path, authority: Authority) -> None:
    async with serving(model_folder, authority) as api:
        assert await api.num_cached("ann") == 0
        assert await api.num_cached("ann") == NUM_CACHED
        assert await api.num_cached("bob") == 0
        assert await api.num_cached("bob") == NUM_CACHED
        assert await api.num_cached("") == 0
        assert await api.num_cached("", user="ann") == NUM_CACHED
        # Within a tenant, whoever names a salt shares with those alone who name the same.
        assert await api.num_cached("ann", cache_salt="x") == 0
        assert await api.num_cached("ann", cache_salt="x") == NUM_CACHED
        assert await api.num_cached("bob", cache_salt="x") == 0
        assert await api.num_cached("ann", cache_salt="y") == 0


async def test_tenants_share_prefixes_where_the_scheduler_is_told_to(model_folder: Path, authority: Authority) -> None:
    async with serving(model_folder, authority, share_prefixes=True) as api:
        assert await api.num_cached("ann") == 0
        assert await api.num_cached("bob") == NUM_CACHED
        assert await api.num_cached("bob", cache_salt="x") == 0
        assert await api.num_cached("ann", cache_salt="x") == NUM_CACHED


async def test_metrics_show_calls_that_were_refused(model_folder: Path, authority: Authority) -> None:
    async with serving(model_folder, authority) as api:
        assert await api.refused("token") == 0
        stranger = Credentials("guess", authority.issue("stranger").trusting(authority))
        async with stranger.dial(api.scheduler) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="token"):
                await SchedulerStub(channel).GetStats(scheduler_pb2.GetStatsRequest(), metadata=stranger.metadata)
        assert await api.refused("token") == 1
        assert await api.refused("replayed_register") == 0
