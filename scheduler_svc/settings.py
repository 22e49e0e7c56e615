"""The scheduler's settings: flags, or `QUIRE_*` variables or files with the same names. Imports nothing heavy."""

from collections.abc import Callable
from math import inf
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protos.settings import ServiceSettings, TlsCa, TlsCert, TlsKey, TlsServerName
from scheduler_svc.core.precision import PrecisionError, PrecisionPolicy, parse_format, parse_policy, policy_of_dtype
from scheduler_svc.core.types import FairnessPolicy
from scheduler_svc.index.redis_url import parse_redis_url


def _parse_weights(text: str) -> dict[str, float]:
    """Return the weights that `text` gives to tenants, by name. Raises ValueError."""
    weights: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, number = item.strip().rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < inf:
            raise ValueError(f"{item!r} is not NAME=WEIGHT, with a weight above 0")
        if name in weights:
            raise ValueError(f"{name!r} is there twice")
        weights[name] = weight
    return weights


class SchedulerSettings(ServiceSettings):
    """Where the scheduler listens, and what it lets a cell take on."""

    model_config = SettingsConfigDict(cli_prog_name="python -m scheduler_svc")

    host: str = Field(default="127.0.0.1", description="interface to listen on")
    cluster_token: str = Field(
        default="", description="secret that every call between services carries; needed beyond loopback"
    )
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""
    tls_ca: TlsCa = ""
    tls_server_name: TlsServerName = ""
    log_level: str = Field(
        default="info", description="least severe log lines that are shown: debug, info, warning, error"
    )

    scheduler_port: int = Field(
        default=50051, ge=0, le=65535, description="port of the scheduler's gRPC service; 0: any free one"
    )
    scheduling_policy: Literal["continuous", "static"] = Field(
        default="continuous",
        description="continuous: sequences join and leave the batch at every step; static: a batch runs to its end "
        "before the next begins (only to compare with)",
    )
    max_num_seqs: int = Field(default=128, ge=1, description="sequences that a worker computes at once")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens that a step computes; none: 256 on a CPU, 8192 on a GPU"
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=1,
        description="sequences (n for each request) of a tenant that may wait for room on a worker, of all tenants "
        "twice as many; more are refused with status 429",
    )
    tenant_weights: str = Field(
        default="",
        description="tenants' shares of the served tokens while several have requests that wait, such as a=2,b=0.5; "
        "others have 1",
    )
    tenant_max_running: int | None = Field(
        default=None, ge=1, description="sequences of a tenant that are computed at once, by all workers; none: any"
    )
    tenant_max_kv_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of a worker's KV cache, 0 to 1, that a tenant's running sequences may have when another one "
        "of them joins; a sequence that is larger runs when the tenant has nothing else there; none: all of it",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="reuse the KV of prompt prefixes that were computed before, instead of computing them again",
    )
    share_prefixes: bool = Field(
        default=False,
        description="reuse prefixes across tenants too; a client can then tell by the time that its request takes "
        "whether another tenant has sent the same prompt",
    )
    kv_cache_dtype: str = Field(
        default="auto",
        description="formats of KV blocks, by name: auto, int8, fp8, k8v4 (int8 keys, int4 values), int4 or mixed (by "
        "age); bfloat16, float16 and float32 are auto, but refuse workers of another --dtype",
    )
    kv_precision_policy: str = Field(
        default="",
        description="formats of KV blocks from the newest to the oldest, each but the last with its number of blocks, "
        "such as native:16,int8:48,int4; empty: what --kv-cache-dtype names",
    )
    kv_precision_floor: str = Field(
        default="",
        description="narrowest format that blocks may be put in when memory is short, before a request gives way; "
        "empty: the policy's last",
    )
    redis_url: str = Field(
        default="",
        description="Redis in which cells tell one another which prefixes they hold: redis://, rediss://, unix://, "
        "redis+sentinel:// or redis+cluster://; give it as a variable where it has a password; empty: none",
    )
    cell_name: str = Field(
        default="",
        description="name of this cell in Redis, the same after a restart; empty: this machine's and the port",
    )
    scheduler_drain_seconds: float = Field(
        default=300.0,
        ge=0,
        description="seconds that running requests get to finish after SIGTERM; what is left then is ended",
    )

    @field_validator("kv_cache_dtype")
    @classmethod
    def _check_kv_cache_dtype(cls, value: str) -> str:
        return _valid(policy_of_dtype, value)

    @field_validator("kv_precision_policy")
    @classmethod
    def _check_kv_precision_policy(cls, value: str) -> str:
        return _valid(parse_policy, value) if value else value

    @field_validator("kv_precision_floor")
    @classmethod
    def _check_kv_precision_floor(cls, value: str) -> str:
        return _valid(parse_format, value) if value else value

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.kv_precision_policy and self.kv_cache_dtype != "auto":
            raise ValueError("--kv-cache-dtype names a precision policy itself: give that or --kv-precision-policy")
        try:
            self.precision()
        except PrecisionError as error:
            raise ValueError(f"--kv-precision-floor: {error}") from None
        return self

    @field_validator("tenant_weights")
    @classmethod
    def _check_tenant_weights(cls, value: str) -> str:
        _parse_weights(value)
        return value

    def fairness(self) -> FairnessPolicy:
        """Return what tenants are entitled to."""
        return FairnessPolicy(_parse_weights(self.tenant_weights), self.tenant_max_running, self.tenant_max_kv_share)

    def precision(self) -> PrecisionPolicy:
        """Return the formats that KV blocks are kept in."""
        floor = self.kv_precision_floor or None
        if self.kv_precision_policy:
            return parse_policy(self.kv_precision_policy, floor)
        return policy_of_dtype(self.kv_cache_dtype, floor)

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        if value:
            parse_redis_url(value)
        return value


def _valid(parse: Callable[[str], object], value: str) -> str:
    """Return the value if it can be parsed. Raises ValueError."""
    try:
        parse(value)
    except PrecisionError as error:
        raise ValueError(str(error)) from None
    return value
