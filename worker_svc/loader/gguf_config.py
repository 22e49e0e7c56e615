"""A GGUF file's hyperparameters as a Hugging Face configuration.

Only what the import understands passes: a file that asks for something else (experts, another architecture, an unknown
rope scaling) is refused by name, because ignoring it would give wrong text without an error.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker_svc.loader.errors import GgufError
from worker_svc.loader.gguf_file import GgufFile

ARCHITECTURE = "llama"
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

# Present and not zero, each of these changes the result of a forward pass in a way that a plain Llama does not have.
_REFUSED_FEATURES = (
    "expert_count",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.scale",
    "attention.temperature_scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.attn_factor",
)

# Of Llama 3's rope scaling a GGUF keeps only one factor per frequency. These are the constants that all published
# models use and converters compute the factors from; the one that varies (8 or 32) is the largest of the factors.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """A Llama's hyperparameters, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, float | str] | None
    max_position_embeddings: int
    tie_word_embeddings: bool

    def to_hf(self) -> dict[str, Any]:
        """Return what `config.json` holds, without the special tokens."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **fields,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "dtype": "bfloat16",
        }


def read_config(gguf: GgufFile) -> ImportedConfig:
    """Return the configuration. Raises GgufError naming the key or tensor that is missing or not supported."""
    if gguf.architecture != ARCHITECTURE:
        raise GgufError(
            f"{gguf.path}: architecture {gguf.architecture} is not supported in a GGUF file, only {ARCHITECTURE}"
        )
    for feature in _REFUSED_FEATURES:
        if gguf.number(f"llama.{feature}", 0.0) != 0.0:
            raise GgufError(f"{gguf.path}: llama.{feature} is not supported")
    if EMBEDDING not in gguf.tensors:
        raise GgufError(f"{gguf.path}: no tensor {EMBEDDING}")
    hidden_size = gguf.integer("llama.embedding_length")
    num_heads = gguf.integer("llama.attention.head_count")
    head_dim = _head_dim(gguf, hidden_size, num_heads)
    rope_theta = gguf.number("llama.rope.freq_base", 10000.0)
    return ImportedConfig(
        vocab_size=gguf.shape(EMBEDDING)[0],
        hidden_size=hidden_size,
        intermediate_size=gguf.integer("llama.feed_forward_length"),
        num_hidden_layers=gguf.integer("llama.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=gguf.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=gguf.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(gguf, head_dim, rope_theta),
        max_position_embeddings=gguf.integer("llama.context_length"),
        tie_word_embeddings=OUTPUT not in gguf.tensors,
    )


def _head_dim(gguf: GgufFile, hidden_size: int, num_heads: int) -> int:
    if num_heads < 1:
        raise GgufError(f"{gguf.path}: llama.attention.head_count is {num_heads}")
    head_dim = gguf.integer("llama.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        length = gguf.integer(f"llama.{key}", head_dim)
        if length != head_dim:
            raise GgufError(f"{gguf.path}: llama.{key} {length} is not supported beside a head size of {head_dim}")
    return head_dim


def _rope_scaling(gguf: GgufFile, head_dim: int, rope_theta: float) -> dict[str, float | str] | None:
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, head_dim, rope_theta)
    factor = gguf.number("llama.rope.scaling.factor", gguf.number("llama.rope.scale_linear", 1.0))
    kind = gguf.string("llama.rope.scaling.type", "linear")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind != "linear":
        raise GgufError(f"{gguf.path}: llama.rope.scaling.type {kind} is not supported, only linear")
    return {"rope_type": "linear", "factor": factor}


def _llama3_scaling(gguf: GgufFile, head_dim: int, rope_theta: float) -> dict[str, float | str]:
    """Return the Llama 3 scaling whose factors are those of `rope_freqs`; refuse the file when there is none."""
    stored = gguf.dequantized(ROPE_FACTORS)
    factor = round(float(stored.max()), 3)
    expected = np.array(_llama3_factors(factor, head_dim, rope_theta), dtype=np.float32)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise GgufError(
            f"{gguf.path}: the factors in {ROPE_FACTORS} are not those of Llama 3's rope scaling: not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT_TOKENS,
    }


def _llama3_factors(factor: float, head_dim: int, rope_theta: float) -> list[float]:
    """Return by how much Llama 3's rope scaling divides each of the head_dim / 2 frequencies."""
    factors = []
    for dimension in range(0, head_dim, 2):
        turns = _LLAMA3_ORIGINAL_CONTEXT_TOKENS / (2 * math.pi * rope_theta ** (dimension / head_dim))
        smooth = (turns - _LLAMA3_LOW_FREQ_FACTOR) / (_LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR)
        kept = min(max(smooth, 0.0), 1.0)  # 1: a fast frequency, left alone; 0: a slow one, slowed by the whole factor
        factors.append(1 / ((1 - kept) / factor + kept))
    return factors
