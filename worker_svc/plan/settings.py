"""The flags of `quire plan`. Those that `quire serve` has too mean the same, and are read from the same variables."""

from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from protos.settings import ServiceSettings
from worker_svc.settings import BlockSize

_SHAPE_FLAGS = ("--layers", "--kv-heads", "--head-size")
_MULTIPLES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class PlanSettings(ServiceSettings):
    """A model or the shape of its KV, the memory for it, and how long sequences are."""

    model_config = SettingsConfigDict(cli_prog_name="quire plan")

    model: str | None = Field(
        None,
        description='Hugging Face folder (its config.json is enough), GGUF file, Hub id, or "bundled"; none: the '
        "bundled model, unless --layers, --kv-heads and --head-size give a shape",
    )
    layers: int | None = Field(None, ge=1, description="layers, in place of a model")
    kv_heads: int | None = Field(None, ge=1, description="key-value heads of a layer, in place of a model")
    head_size: int | None = Field(None, ge=1, description="elements of a head, in place of a model")
    parameters: int | None = Field(
        None, ge=1, description="parameters of the model, such as 6.74B; none: what its config makes"
    )
    weights_memory: ByteSize | None = Field(
        None, description="bytes that the weights take, such as 12GiB; none: parameters x bytes of --dtype"
    )
    memory: ByteSize | None = Field(None, description="the device's memory for weights and KV, such as 80GiB")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of --memory that may be taken")
    kv_cache_memory: ByteSize | None = Field(
        None, description="memory for KV alone, in place of --memory: that of quire serve on a CPU"
    )
    mean_length: int = Field(2048, ge=1, description="tokens of a sequence on average, prompt and output together")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of the weights and of native KV; auto: bfloat16"
    )
    block_size: BlockSize = Field(16, description="tokens of a KV block: 8, 16 or 32")
    output: Literal["table", "json"] = Field("table", description="what is printed: table or json")
    plot: Path | None = Field(None, description="PNG file for a plot over context lengths; none: no plot")

    @field_validator("parameters", mode="before")
    @classmethod
    def _read_parameters(cls, value: object) -> object:
        if value is None:
            return None
        text = str(value).strip().upper()
        multiple = _MULTIPLES.get(text[-1:], 1)
        try:
            return round(float(text.removesuffix(text[-1:]) if multiple > 1 else text) * multiple)
        except (ValueError, OverflowError):
            raise ValueError(f"{value} is not a number such as 6.74B or 135M") from None

    @field_validator("weights_memory", "memory", "kv_cache_memory")
    @classmethod
    def _check_bytes(cls, value: ByteSize | None) -> ByteSize | None:
        if value is not None and value <= 0:
            raise ValueError("not more than 0 bytes")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> "PlanSettings":
        if (self.memory is None) == (self.kv_cache_memory is None):
            raise ValueError("give one of --memory, such as --memory 80GiB, and --kv-cache-memory")
        if self.parameters is not None and self.weights_memory is not None:
            raise ValueError("give --parameters or --weights-memory, not both")
        given = [flag for flag, value in zip(_SHAPE_FLAGS, self._shape(), strict=True) if value is not None]
        if not given:
            return self
        if missing := [flag for flag in _SHAPE_FLAGS if flag not in given]:
            raise ValueError(f"a shape needs {', '.join(_SHAPE_FLAGS)}: {missing[0]} is missing")
        if self.model is not None:
            raise ValueError(f"give --model or a shape ({', '.join(_SHAPE_FLAGS)}), not both")
        if self.memory is not None and self.parameters is None and self.weights_memory is None:
            raise ValueError("a shape does not tell how large the weights are: give --parameters or --weights-memory")
        return self

    def _shape(self) -> tuple[int | None, ...]:
        return self.layers, self.kv_heads, self.head_size
