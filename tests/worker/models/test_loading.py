"""Checkpoints that do not fit their config: each ends in an error that names the tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.models.checkpoints import CPU, Saved, Tensors, save
from worker_svc import kv
from worker_svc.errors import OutOfMemoryAtStartError
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.errors import MissingTensorError
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder
from worker_svc.models.errors import TensorError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("llama-tied", tmp_path_factory.mktemp("llama-tied"))


@pytest.fixture
def source(saved: Saved) -> Tensors:
    return Tensors(load_file(saved.folder / "model.safetensors"))


def load(saved: Saved, source: Tensors) -> Decoder:
    return Decoder.load(ModelConfig.from_hf(saved.hf_config), source, torch.float32, CPU)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.weight",
    ],
)
def test_missing_tensor_is_named(saved: Saved, source: Tensors, name: str, tmp_path: Path) -> None:
    del source.tensors[name]
    save_file(source.tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError, match=name.replace(".", r"\.")):
        Decoder.load(ModelConfig.from_hf(saved.hf_config), Checkpoint(tmp_path), torch.float32, CPU)


def test_untied_head_must_be_there(saved: Saved, tmp_path: Path) -> None:
    config = ModelConfig.from_hf({**saved.hf_config, "tie_word_embeddings": False})
    with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
        Decoder.load(config, Checkpoint(saved.folder), torch.float32, CPU)


def test_wrong_shape_is_named_with_both_shapes(saved: Saved, source: Tensors) -> None:
    source.tensors["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(31, 48)
    with pytest.raises(TensorError, match=r"layers\.0\.self_attn\.v_proj\.weight has shape \[31, 48\].*\[32, 48\]"):
        load(saved, source)


def test_integer_weights_are_refused(saved: Saved, source: Tensors) -> None:
    source.tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 80, dtype=torch.int8)
    with pytest.raises(TensorError, match=r"down_proj\.weight has dtype torch\.int8"):
        load(saved, source)


def test_tensor_without_a_place_is_refused(saved: Saved, source: Tensors) -> None:
    source.tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)
    with pytest.raises(TensorError, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(saved, source)


def test_old_buffers_and_the_copy_of_a_tied_head_are_let_be(saved: Saved, source: Tensors) -> None:
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].clone()
    assert load(saved, source).config.tie_word_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_as_packed_are_refused_before_memory_runs_out(
    saved: Saved, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_bytes = sum(layer.weight_bytes for layer in saved.load(dtype)._layers[1:])
    monkeypatch.setattr(kv, "free_host_bytes", lambda: others_bytes)
    saved.load(dtype)
    monkeypatch.setattr(kv, "free_host_bytes", lambda: others_bytes - 1)
    with pytest.raises(OutOfMemoryAtStartError, match=f"weights needs {others_bytes:,} bytes"):
        saved.load(dtype)


def test_nothing_of_the_checkpoint_is_kept(saved: Saved, source: Tensors) -> None:
    decoder = load(saved, source)
    hidden = torch.ones(1, 48)
    before = decoder.compute_logits(hidden), decoder._embedding.clone()
    for tensor in source.tensors.values():
        tensor.zero_()
    assert torch.equal(decoder.compute_logits(hidden), before[0])
    assert torch.equal(decoder._embedding, before[1])
