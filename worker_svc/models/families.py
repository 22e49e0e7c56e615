"""The table of differences between model families that share one decoder.

Llama is the base: pre-norm blocks of RMSNorm, rotary attention and SwiGLU, no biases. A row of `FAMILIES` says where a
family departs from it. To add one that fits, add a row and a test against `transformers`; a departure that no column
can say is a new column here and a branch in `decoder.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from worker_svc.models.errors import UnsupportedModelError

HFConfig = Mapping[str, Any]


def no_window(_config: HFConfig) -> int | None:
    """Every token attends to all before it, whatever the config says."""
    return None


def window_of_every_layer(config: HFConfig) -> int | None:
    """Mistral: `sliding_window` tokens in every layer; null means no window, absent means 4,096."""
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def window_where_enabled(config: HFConfig) -> int | None:
    """Qwen2: a window only with `use_sliding_window`, in layers from `max_window_layers` on (or by `layer_types`)."""
    window = config.get("sliding_window", 4096)
    if not config.get("use_sliding_window", False) or window is None:
        return None
    num_layers = int(config["num_hidden_layers"])
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) == {"sliding_attention"}:
        return int(window)
    raise UnsupportedModelError("unsupported config field layer_types: layers with and without a sliding window")


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama.

    `window` reads the sliding window in tokens, the query's own token included, from a config; None: no window.
    """

    architecture: str  # as in the config's `architectures`
    model_type: str
    qkv_bias: bool = False
    window: Callable[[HFConfig], int | None] = no_window


FAMILIES = (
    Family("LlamaForCausalLM", "llama"),
    Family("MistralForCausalLM", "mistral", window=window_of_every_layer),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window=window_where_enabled),
)


def family_of(config: HFConfig) -> Family:
    """Return the family of a config by `architectures`, or by `model_type` where that is absent.

    Raises UnsupportedModelError that names the architecture.
    """
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in architectures or (
            not architectures and family.model_type == config.get("model_type")
        ):
            return family
    asked = ", ".join(architectures) or config.get("model_type") or "none named in config.json"
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModelError(f"unsupported architecture {asked}: Quire serves {known}")
