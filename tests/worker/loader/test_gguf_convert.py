"""GGUF files of tiny Llamas: what comes out computes what went in, and what cannot be imported is refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.worker.loader.gguf_files import make_llama, metadata_of, tensors_of, write_gguf, write_llama
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.errors import GgufError
from worker_svc.loader.gguf_config import read_config
from worker_svc.loader.gguf_convert import convert
from worker_svc.loader.gguf_file import GgufFile
from worker_svc.loader.gguf_weights import plan_tensors, write_weights

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def ignore(_line: str) -> None:
    """Progress that nobody reads."""


def imported(gguf_path: Path) -> Path:
    folder = gguf_path.parent / "imported"
    folder.mkdir()
    convert(gguf_path, folder, ignore)
    return folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(1, 17)[None]).logits
    return logits


def assert_same_model(folder: Path, expected: LlamaForCausalLM) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits_of(loaded), logits_of(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
    ],
    ids=["grouped-query", "tied-output", "multi-head", "wide-heads"],
)
def test_imported_model_computes_what_the_original_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = make_llama(**changes)
    folder = imported(write_gguf(tmp_path / "m.gguf", metadata_of(model), tensors_of(model)))
    assert_same_model(folder, model)


def test_weights_are_bf16(tmp_path: Path) -> None:
    checkpoint = Checkpoint(imported(write_llama(tmp_path / "m.gguf")))
    assert {checkpoint.tensor(name).dtype for name in checkpoint.names()} == {torch.bfloat16}


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    weight = make_llama().model.layers[1].mlp.up_proj.weight
    stored = Checkpoint(imported(path)).tensor("model.layers.1.mlp.up_proj.weight").float()
    # Q8_0 rounds to 1/127 of the largest of 32 neighbours (half of it away at most), bf16 to 2^-9 of the value.
    largest = weight.detach().abs().max()
    torch.testing.assert_close(stored, weight.detach(), rtol=2**-8, atol=float(largest) / 127)


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    model = make_llama()
    file = GgufFile(write_gguf(tmp_path / "m.gguf", metadata_of(model), tensors_of(model)))
    planned = plan_tensors(file, read_config(file))
    write_weights(file, planned, tmp_path, ignore, max_shard_bytes=40_000)
    shards = sorted(path.name for path in tmp_path.glob("model-*.safetensors"))
    assert shards == [f"model-{idx:05d}-of-{len(shards):05d}.safetensors" for idx in range(1, len(shards) + 1)]
    assert len(shards) > 1
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name).float(), tensor)


def test_llama3_rope_factors_become_its_rope_scaling(tmp_path: Path) -> None:
    model = make_llama(rope_parameters=LLAMA3_ROPE)
    plain = 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    factors = (plain / scaled.numpy()).astype(np.float32)
    assert factors.min() == pytest.approx(1.0)
    assert factors.max() == pytest.approx(32.0)
    tensors = {**tensors_of(model), "rope_freqs.weight": factors}
    folder = imported(write_gguf(tmp_path / "m.gguf", metadata_of(model), tensors))
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert scaling == {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
    assert_same_model(folder, model)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    model = make_llama()
    tensors = {**tensors_of(model), "rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(GgufError, match=r"rope_freqs\.weight are not those of Llama 3"):
        imported(write_gguf(tmp_path / "m.gguf", metadata_of(model), tensors))


def test_linear_rope_scaling_is_kept(tmp_path: Path) -> None:
    model = make_llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})
    changes = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = imported(write_gguf(tmp_path / "m.gguf", {**metadata_of(model), **changes}, tensors_of(model)))
    assert_same_model(folder, model)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.pre",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.eos_token_id",
    ],
)
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(GgufError, match=f"the metadata has no {key}"):
        imported(write_llama(tmp_path / "m.gguf", {key: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is not supported"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count should be of type int"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8 is not supported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
            "rope.scaling.type yarn is not supported",
        ),
        ({"llama.embedding_length": 32}, r"token_embd\.weight has shape \(\d+, 64\), expected \(\d+, 32\)"),
        ({"llama.block_count": 3}, r"no tensor blk\.2\.attn_norm\.weight"),
        ({"llama.block_count": 1}, r"tensor blk\.1\.attn_k\.weight is not one of a plain Llama"),
        ({"split.count": 2}, "one of 2 parts"),
    ],
)
def test_unsupported_metadata_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        imported(write_llama(tmp_path / "m.gguf", changes))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="architecture qwen2 is not supported"):
        imported(write_llama(tmp_path / "m.gguf", architecture="qwen2"))


def test_a_bias_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    model = make_llama()
    tensors = {**tensors_of(model), "blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}
    with pytest.raises(GgufError, match=r"tensor blk\.0\.attn_q\.bias is not one of a plain Llama"):
        imported(write_gguf(tmp_path / "m.gguf", metadata_of(model), tensors))


@pytest.mark.parametrize("kept", [0.001, 0.01, 0.5, 0.99])
def test_file_cut_short_is_named(tmp_path: Path, kept: float) -> None:
    path = write_llama(tmp_path / "m.gguf")
    contents = path.read_bytes()
    path.write_bytes(contents[: int(len(contents) * kept)])
    with pytest.raises(GgufError, match=r"damaged or unsupported GGUF file .*m\.gguf") as caught:
        imported(path)
    assert "\n" not in str(caught.value)
