"""Tiny random checkpoints made with `transformers`, and its own forward pass as the oracle."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder

VOCAB_SIZE = 97
CPU = torch.device("cpu")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large: attention must not be near uniform, or errors in it would not show
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Each differs from the others in something that the decoder must get right.
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-llama3-rope": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-rope": LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    ),
    "llama-multi-head": LlamaConfig(**{**_SHAPE, "num_key_value_heads": 6}),
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=7),
    "mistral-no-window": MistralConfig(**_SHAPE, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=0),
}
_MODELS: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
}


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint folder and the model that was saved there."""

    folder: Path
    model: PreTrainedModel

    @property
    def hf_config(self) -> dict[str, Any]:
        contents: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return contents

    def load(self, dtype: torch.dtype = torch.float32) -> Decoder:
        return Decoder.load(ModelConfig.from_hf(self.hf_config), Checkpoint(self.folder), dtype, CPU)

    def expected_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return what `transformers` computes in one forward pass over the whole sequence, [T, vocab]."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Saved:
    """Save a random model of `CONFIGS` in `dtype`; the oracle computes in float32, on the weights as saved."""
    torch.manual_seed(sum(name.encode()))
    model_class = _MODELS[type(CONFIGS[name])]
    model = model_class(CONFIGS[name])
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norm weights start as ones and biases as zeros, which would hide what is left out
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.mean() == 1.0 else 0.0, std=0.3)
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return Saved(folder, model_class.from_pretrained(folder, dtype=torch.float32))


class Tensors:
    """Tensors in memory as a source: a saved model's, without some or with others."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]
