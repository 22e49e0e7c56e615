"""A model's shape, read from a Hugging Face `config.json`.

Reading is strict where a field changes what is computed: a value that the decoder would silently ignore is refused by
name. Fields that matter only in training or to other programs pass unread.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker_svc.models.errors import UnsupportedModelError
from worker_svc.models.families import Family, HFConfig, family_of

# Fields that change the computation, with the values that leave it as the decoder does it (absent does too).
_ONLY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, the ones between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # tokens


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and how it was stretched to longer contexts."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that the decoder needs to know of a model before its tensors."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    sliding_window: int | None  # tokens, the query's own included
    eos_token_ids: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; an embedding that the head shares counts once."""
        qkv_rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        attention = (qkv_rows + self.num_heads * self.head_size) * self.hidden_size
        biases = qkv_rows if self.family.qkv_bias else 0
        mlp = 3 * self.hidden_size * self.intermediate_size
        norms = (2 * self.num_layers + 1) * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * (attention + biases + mlp) + norms

    @classmethod
    def from_hf(cls, config: HFConfig, generation_config: HFConfig | None = None) -> "ModelConfig":
        """Read the contents of `config.json` and, where there is one, of `generation_config.json`.

        The latter's end-of-sequence tokens count before the former's: chat models list there the end of a turn too.
        Raises UnsupportedModelError that names the architecture or the field.
        """
        family = family_of(config)
        _refuse_unsupported(config, family)
        vocab_size, hidden_size = _positive(config, "vocab_size"), _positive(config, "hidden_size")
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_size = _positive(config, "head_dim", hidden_size // num_heads)
        if head_size % 2:
            raise UnsupportedModelError(f"unsupported config field head_dim: {head_size} is odd")
        return cls(
            family=family,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=_positive(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(config),
            max_position_embeddings=_positive(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=family.window(config),
            eos_token_ids=_read_eos(generation_config or {}, vocab_size) or _read_eos(config, vocab_size),
        )


def _refuse_unsupported(config: HFConfig, family: Family) -> None:
    for name, allowed in _ONLY_VALUES.items():
        if name in config and config[name] not in allowed:
            raise UnsupportedModelError(f"unsupported config field {name}: {config[name]!r}")
    # Of families whose projections have biases always, configs carry no such field.
    if config.get("attention_bias") and not family.qkv_bias:
        raise UnsupportedModelError(
            f"unsupported config field attention_bias: {family.architecture} is served without biases"
        )


def _positive(config: HFConfig, name: str, default: int | None = None) -> int:
    """Return a field that must be a positive integer; absent or null it is `default`, where there is one."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModelError(f"config.json lacks {name}")
    if not isinstance(value, int) or value <= 0:
        raise UnsupportedModelError(f"unsupported config field {name}: {value!r} is not a positive integer")
    return value


def _read_rope(config: HFConfig) -> RopeConfig:
    """Read both spellings: `rope_parameters`, and the older `rope_theta` beside `rope_scaling`."""
    rope: HFConfig = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModelError(
            f"unsupported config field rope_parameters.partial_rotary_factor: {rope['partial_rotary_factor']!r}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))

    def number(name: str) -> float:
        value = rope.get(name)
        if not isinstance(value, int | float):
            raise UnsupportedModelError(f"config.json lacks the number {name} of rope scaling {kind!r}")
        return float(value)

    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(number("factor")))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_max_position_embeddings=int(number("original_max_position_embeddings")),
        )
        return RopeConfig(theta, scaling)
    raise UnsupportedModelError(f"unsupported rope scaling {kind!r}: Quire computes default, linear and llama3")


def _read_eos(config: HFConfig, vocab_size: int) -> tuple[int, ...]:
    """Return `eos_token_id`, which is one id, a list of ids, null or absent, without ids that the model never gives."""
    ids = config.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(token_id) for token_id in (ids if isinstance(ids, list) else [ids]) if 0 <= token_id < vocab_size)
