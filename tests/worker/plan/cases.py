"""Models whose figures are known, by their published configurations, and plans of them."""

from typing import Any

from protos.settings import read_settings
from worker_svc.models.config import ModelConfig
from worker_svc.plan.memory import MemoryPlan, plan_memory
from worker_svc.plan.settings import PlanSettings
from worker_svc.plan.shape import ModelShape, read_shape

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def _hf_config(architecture: str, **fields: Any) -> dict[str, Any]:
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    )
    return {"architectures": [architecture], **dict(zip(names, fields.pop("numbers"), strict=True)), **fields}


LLAMA_2_7B = _hf_config("LlamaForCausalLM", numbers=(32, 4096, 32, 32, 11008, 32000, 4096))
LLAMA_2_70B = _hf_config("LlamaForCausalLM", numbers=(80, 8192, 64, 8, 28672, 32000, 4096))
MISTRAL_7B = _hf_config(
    "MistralForCausalLM", numbers=(32, 4096, 32, 8, 14336, 32000, 32768), sliding_window=None, head_dim=128
)
QWEN2_7B = _hf_config("Qwen2ForCausalLM", numbers=(28, 3584, 28, 4, 18944, 152064, 32768))
SMOLLM2_135M = _hf_config("LlamaForCausalLM", numbers=(30, 576, 9, 3, 1536, 49152, 8192), tie_word_embeddings=True)


def make_shape(hf_config: dict[str, Any], name: str = "model") -> ModelShape:
    config = ModelConfig.from_hf(hf_config)
    return ModelShape(
        name=name,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_parameters=config.num_parameters,
        max_model_len=config.max_position_embeddings,
    )


def make_settings(*arguments: str) -> PlanSettings:
    return read_settings(PlanSettings, arguments)


def make_plan(hf_config: dict[str, Any], *arguments: str) -> MemoryPlan:
    return plan_memory(make_settings(*arguments), make_shape(hf_config))


def plan_of_flags(*arguments: str) -> MemoryPlan:
    settings = make_settings(*arguments)
    return plan_memory(settings, read_shape(settings, print))
