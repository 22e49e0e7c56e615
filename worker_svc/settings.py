"""The worker's settings: flags, or `QUIRE_*` variables or files with the same names. Imports nothing heavy."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field, field_validator
from pydantic_settings import SettingsConfigDict

from protos.settings import ServiceSettings, TlsCa, TlsCert, TlsKey, TlsServerName

KV_FORMATS = ("native", "int8", "fp8", "k8v4", "int4")
BLOCK_SIZES = (8, 16, 32)  # what the kernels are compiled for


def _check_block_size(value: int) -> int:
    if value not in BLOCK_SIZES:
        raise ValueError(f"{value} is none of {', '.join(map(str, BLOCK_SIZES))}")
    return value


BlockSize = Annotated[int, AfterValidator(_check_block_size)]  # tokens


def _check_device(value: str) -> str:
    if not re.fullmatch(r"cpu|(auto|cuda)(:\d{1,3})?", value):
        raise ValueError(f"{value} is none of auto, cpu, cuda, auto:N and cuda:N")
    return value


Device = Annotated[str, AfterValidator(_check_device)]


class WorkerSettings(ServiceSettings):
    """How a worker computes, what it keeps in memory, where it listens and whom it serves."""

    model_config = SettingsConfigDict(cli_prog_name="python -m worker_svc")

    model: str = Field(
        "bundled",
        description='Hugging Face folder, GGUF file, Hub id, or "bundled" for the small model that comes along',
    )
    host: str = Field("127.0.0.1", description="interface to listen on")
    cluster_token: str = Field(
        "", description="secret that every call between services carries; needed beyond loopback"
    )
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""
    tls_ca: TlsCa = ""
    tls_server_name: TlsServerName = ""
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines that are shown: debug, info, warning, error"
    )
    scheduler: str = Field("127.0.0.1:50051", description="HOST:PORT of the scheduler")

    worker_port: int = Field(0, ge=0, le=65535, description="port of the worker's gRPC service; 0: any free one")
    worker_address: str = Field(
        "", description="HOST:PORT at which the scheduler reaches this worker; empty: the one it listens on"
    )
    worker_drain_seconds: float = Field(
        30.0,
        ge=0,
        description="seconds that running sequences get to finish after SIGTERM; what is left then goes on elsewhere",
    )
    device: Device = Field(
        "auto",
        description="where to compute: cpu, cuda (the first GPU) or cuda:N; auto and auto:N: that GPU, or cpu where "
        "there is none, or it is too old",
    )
    num_threads: int | None = Field(
        None, ge=1, description="threads that compute on a CPU; none: one for each core this process may use"
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="compute dtype, and that of native KV; auto: bfloat16",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="tokens of a sequence, prompt and output together; none: what the model was made for"
    )
    max_num_seqs: int = Field(128, ge=1, description="sequences that a worker computes at once")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="tokens that a step computes; none: 256 on a CPU, 8192 on a GPU"
    )
    block_size: BlockSize = Field(16, description="tokens of a KV block: 8, 16 or 32")
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="bytes of the KV arena, such as 512MiB or 4GiB; none: 1GiB on a CPU (half of what is free, if that "
        "is less), and on a GPU what --gpu-memory-utilization leaves",
    )
    kv_formats: str = Field(
        "all",
        description="formats that KV blocks may have here, by comma: native, int8, fp8, k8v4, int4; a GPU's kernels "
        "for fewer formats are faster; all: every one",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory that weights, activations and KV arena may take"
    )
    enforce_eager: bool = Field(
        False, description="launch every kernel of every step on a GPU, rather than record CUDA graphs of decode steps"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share the model's layers")

    @field_validator("kv_formats")
    @classmethod
    def _check_kv_formats(cls, value: str) -> str:
        for name in value.split(","):
            if name not in ("all", *KV_FORMATS):
                raise ValueError(f"{name} is none of all, {', '.join(KV_FORMATS)}")
        return value

    @field_validator("tensor_parallel_size")
    @classmethod
    def _check_tensor_parallel_size(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"{value} GPUs a worker are more than this version can use: only 1 is")
        return value
