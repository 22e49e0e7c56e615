"""The gateway's settings: flags, or `QUIRE_*` variables or files with the same names. Imports nothing heavy."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from protos.settings import ServiceSettings, TlsCa, TlsCert, TlsKey, TlsServerName


class GatewaySettings(ServiceSettings):
    """Where the gateway listens, whose scheduler it uses, and how it treats its clients."""

    model_config = SettingsConfigDict(cli_prog_name="python -m gateway")

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
    log_level: str = Field("info", description="least severe log lines that are shown: debug, info, warning, error")
    scheduler: str = Field("127.0.0.1:50051", description="HOST:PORT of the scheduler")

    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0: any free one")
    served_model_name: str = Field(
        "", description="name by which clients call the model; empty: the one that the workers give it"
    )
    chat_template: str = Field(
        "", description="file with a Jinja chat template to use in place of the model's own; empty: the model's own"
    )
    api_keys_file: str = Field(
        "",
        description="file with a line TENANT:SHA256 for each API key (quire key makes them); /v1 then answers to these "
        "keys alone; read again when it changes",
    )
    api_keys: str = Field("", description="such lines themselves, with a comma between two; both may be given")
    request_timeout_seconds: float | None = Field(
        None, gt=0, le=10**9, description="seconds after which a request ends with status 504; none: no limit"
    )
    client_stall_seconds: float = Field(
        30.0, gt=0, description="seconds that a client may leave its stream unread before its request is aborted"
    )
    gateway_drain_seconds: float = Field(
        300.0, ge=0, description="seconds that running requests get to finish after SIGTERM; what is left then is cut"
    )
