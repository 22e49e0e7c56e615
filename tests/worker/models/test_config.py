"""Reading config.json: what is read, and that nothing which would be computed wrongly passes."""

from pathlib import Path
from typing import Any

import pytest

from tests.worker.models.checkpoints import CONFIGS, save
from worker_svc.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig
from worker_svc.models.errors import UnsupportedModelError


def make_hf_config(**changes: Any) -> dict[str, Any]:
    """The config of SmolLM2-135M-Instruct, in the older spelling that most checkpoints have."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
        **changes,
    }


def make_mistral_config(**changes: Any) -> dict[str, Any]:
    return make_hf_config(architectures=["MistralForCausalLM"], **changes)


def make_qwen2_config(**changes: Any) -> dict[str, Any]:
    return make_hf_config(architectures=["Qwen2ForCausalLM"], **changes)


def test_llama_config_is_read() -> None:
    config = ModelConfig.from_hf(make_hf_config())
    assert config.family.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (30, 9, 3, 64)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-05, 8192)
    assert config.rope == RopeConfig(100000.0)
    assert config.tie_word_embeddings
    assert config.sliding_window is None
    assert config.eos_token_ids == (2,)


def test_absent_fields_mean_what_they_mean_in_transformers() -> None:
    hf_config = make_hf_config()
    for name in ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "eos_token_id"):
        del hf_config[name]
    config = ModelConfig.from_hf(hf_config)
    assert config.num_kv_heads == 9
    assert (config.rms_norm_eps, config.rope.theta) == (1e-06, 10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_as_transformers_writes_them_are_read(name: str) -> None:
    hf_config = CONFIGS[name].to_dict()
    config = ModelConfig.from_hf(hf_config)
    assert config.family.model_type == hf_config["model_type"]
    assert config.rope.theta == hf_config["rope_parameters"]["rope_theta"]


def test_generation_config_names_the_end_of_sequence_tokens_first() -> None:
    assert ModelConfig.from_hf(make_hf_config(), {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert ModelConfig.from_hf(make_hf_config(), {"temperature": 0.6}).eos_token_ids == (2,)


def test_end_of_sequence_tokens_that_the_model_never_gives_are_left_out() -> None:
    assert ModelConfig.from_hf(make_hf_config(), {"eos_token_id": [7, 49152, -1]}).eos_token_ids == (7,)
    assert ModelConfig.from_hf(make_hf_config(), {"eos_token_id": 49152}).eos_token_ids == (2,)


@pytest.mark.parametrize("spelling", [{"rope_type": "linear"}, {"type": "linear"}])
def test_linear_rope_scaling_in_both_spellings(spelling: dict[str, str]) -> None:
    config = ModelConfig.from_hf(make_hf_config(rope_scaling={**spelling, "factor": 2.0}))
    assert config.rope == RopeConfig(100000.0, LinearScaling(2.0))


def test_llama3_rope_parameters() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = ModelConfig.from_hf(make_hf_config(rope_parameters=rope))
    assert config.rope == RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def test_windows_are_the_familys_own() -> None:
    assert ModelConfig.from_hf(make_hf_config(sliding_window=100)).sliding_window is None
    assert ModelConfig.from_hf(make_mistral_config(sliding_window=100)).sliding_window == 100
    assert ModelConfig.from_hf(make_mistral_config(sliding_window=None)).sliding_window is None
    assert ModelConfig.from_hf(make_mistral_config()).sliding_window == 4096
    assert ModelConfig.from_hf(make_qwen2_config(sliding_window=100)).sliding_window is None
    enabled = {"sliding_window": 100, "use_sliding_window": True}
    assert ModelConfig.from_hf(make_qwen2_config(**enabled, max_window_layers=30)).sliding_window is None
    assert ModelConfig.from_hf(make_qwen2_config(**enabled, max_window_layers=0)).sliding_window == 100


@pytest.mark.parametrize(
    ("hf_config", "named"),
    [
        (make_hf_config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (make_hf_config(architectures=None, model_type="mamba"), "mamba"),
        ({}, "none named"),
        (make_hf_config(attention_bias=True), "attention_bias"),
        (make_hf_config(mlp_bias=True), "mlp_bias"),
        (make_hf_config(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (make_hf_config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (make_hf_config(rope_interleaved=True), "rope_interleaved"),
        (make_hf_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
        (make_hf_config(rope_scaling={"rope_type": "linear"}), "factor"),
        (make_hf_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (make_hf_config(num_key_value_heads=4), "num_key_value_heads 4"),
        (make_hf_config(hidden_size=None), "hidden_size"),
        (make_hf_config(vocab_size="many"), "vocab_size"),
        (make_hf_config(head_dim=63), "head_dim"),
        (make_qwen2_config(sliding_window=9, use_sliding_window=True, max_window_layers=4), "layer_types"),
    ],
)
def test_what_is_not_supported_is_named(hf_config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        ModelConfig.from_hf(hf_config)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_are_counted_as_transformers_does(name: str, tmp_path: Path) -> None:
    saved = save(name, tmp_path)
    assert ModelConfig.from_hf(saved.hf_config).num_parameters == saved.model.num_parameters()


def test_parameters_of_a_published_model() -> None:
    assert ModelConfig.from_hf(make_hf_config()).num_parameters == 134_515_008
