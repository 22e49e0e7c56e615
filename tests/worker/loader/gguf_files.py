"""Writes small GGUF files as llama.cpp's converter does, out of `transformers` Llamas: query and key rows reordered."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL, NORMAL, USER_DEFINED = 3, 1, 4

# "Ġ" is a blank in byte-level BPE.
TOKENS = ["<s>", "</s>", "<tool>", *"abcdefghij0123Ġ", "ab", "abc", "bc"]
TYPES = [CONTROL, CONTROL, USER_DEFINED, *[NORMAL] * (len(TOKENS) - 3)]
MERGES = ["a b", "ab c"]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a tiny random Llama in float32 whose weights are exact in bf16, so that an import must keep every bit."""
    shape: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    with torch.no_grad():
        for weight in model.parameters():  # not the buffers: the rotary frequencies are no weights
            weight.copy_(weight.to(torch.bfloat16))
    return model


def metadata_of(model: LlamaForCausalLM) -> dict[str, Any]:
    """Return what a converter would write for `model`, with the tiny tokenizer."""
    config: Any = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def tensors_of(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Return the model's tensors under GGUF's names and in GGUF's row order."""
    config: Any = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if name.endswith("q_proj.weight"):
            values = _permuted(values, config.num_attention_heads)
        if name.endswith("k_proj.weight"):
            values = _permuted(values, config.num_key_value_heads)
        tensors[_gguf_name(name)] = values
    return tensors


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write a GGUF file; metadata that is None is left out, matrices are stored in `quantization`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is not None:
            _adder(writer, value)(key, value)
    for name, values in tensors.items():
        stored = quantization if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama(path: Path, changes: dict[str, Any] | None = None, **options: Any) -> Path:
    """Write a tiny Llama with some metadata changed."""
    model = make_llama()
    return write_gguf(path, {**metadata_of(model), **(changes or {})}, tensors_of(model), **options)


def _adder(writer: gguf.GGUFWriter, value: Any) -> Any:
    return {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }[type(value)]


def _permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    rows, columns = values.shape
    return values.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, idx, stem = stem.split(".", 3)
        prefix = f"blk.{idx}."
    return f"{prefix}{_NAMES[stem]}.weight"
