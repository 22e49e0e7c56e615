"""A GGUF Llama's tensors as Hugging Face safetensors in bf16.

Converters to GGUF reorder the rows of each query and key head, because llama.cpp rotates neighbouring rows where
Hugging Face rotates the two halves of a head. The import puts them back:

    GGUF          0  d/2  1  d/2+1  2  d/2+2 ...
    Hugging Face  0  1  2 ... d/2-1  d/2  d/2+1 ...      (rows of one head, d = head size)
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from worker_svc.loader.errors import GgufError
from worker_svc.loader.folder import INDEX_FILE, WEIGHTS_FILE
from worker_svc.loader.gguf_config import EMBEDDING, OUTPUT, ROPE_FACTORS, ImportedConfig
from worker_svc.loader.gguf_file import GgufFile

# A shard is built in memory before it is written, so this also bounds the memory that an import takes.
MAX_SHARD_BYTES = 2 * 1024**3

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the result: where it comes from, its Hugging Face name, its shape, and the heads to reorder."""

    source: str
    name: str
    shape: tuple[int, ...]
    permuted_heads: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in bf16."""
        return 2 * int(np.prod(self.shape))


def plan_tensors(gguf: GgufFile, config: ImportedConfig) -> list[PlannedTensor]:
    """Return what to write. Raises GgufError naming a tensor that is missing, has another shape, or is not known."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    planned = [
        PlannedTensor(EMBEDDING, "model.embed_tokens.weight", (config.vocab_size, hidden)),
        PlannedTensor("output_norm.weight", "model.norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        planned.append(PlannedTensor(OUTPUT, "lm_head.weight", (config.vocab_size, hidden)))
    for idx in range(config.num_hidden_layers):
        source, target = f"blk.{idx}.", f"model.layers.{idx}."
        planned += [
            PlannedTensor(f"{source}attn_norm.weight", f"{target}input_layernorm.weight", (hidden,)),
            PlannedTensor(
                f"{source}attn_q.weight",
                f"{target}self_attn.q_proj.weight",
                (query, hidden),
                permuted_heads=config.num_attention_heads,
            ),
            PlannedTensor(
                f"{source}attn_k.weight",
                f"{target}self_attn.k_proj.weight",
                (key, hidden),
                permuted_heads=config.num_key_value_heads,
            ),
            PlannedTensor(f"{source}attn_v.weight", f"{target}self_attn.v_proj.weight", (key, hidden)),
            PlannedTensor(f"{source}attn_output.weight", f"{target}self_attn.o_proj.weight", (hidden, query)),
            PlannedTensor(f"{source}ffn_norm.weight", f"{target}post_attention_layernorm.weight", (hidden,)),
            PlannedTensor(f"{source}ffn_gate.weight", f"{target}mlp.gate_proj.weight", (inner, hidden)),
            PlannedTensor(f"{source}ffn_up.weight", f"{target}mlp.up_proj.weight", (inner, hidden)),
            PlannedTensor(f"{source}ffn_down.weight", f"{target}mlp.down_proj.weight", (hidden, inner)),
        ]
    _check_against_file(gguf, planned)
    return planned


def _check_against_file(gguf: GgufFile, planned: list[PlannedTensor]) -> None:
    for tensor in planned:
        if tensor.source not in gguf.tensors:
            raise GgufError(f"{gguf.path}: no tensor {tensor.source}")
        if gguf.shape(tensor.source) != tensor.shape:
            raise GgufError(
                f"{gguf.path}: tensor {tensor.source} has shape {gguf.shape(tensor.source)}, expected {tensor.shape}"
            )
    # A tensor left over (a bias, an expert's router) is part of the computation: without it the output would be wrong.
    unknown = gguf.tensors.keys() - {tensor.source for tensor in planned} - {ROPE_FACTORS}
    if unknown:
        raise GgufError(f"{gguf.path}: tensor {min(unknown)} is not one of a plain Llama: not supported")


def write_weights(
    gguf: GgufFile,
    planned: list[PlannedTensor],
    folder: Path,
    progress: Callable[[str], None],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write all planned tensors into `folder`, as one file or as an index and shards of about `max_shard_bytes`.

    Raises GgufError when the disk has too little room, and OSError when it cannot be written.
    """
    needed, free = sum(tensor.num_bytes for tensor in planned), shutil.disk_usage(folder).free
    if needed > free:
        raise GgufError(f"importing {gguf.path} needs {needed} bytes in {folder.parent}, where {free} are free")
    shards = _split(planned, max_shard_bytes)
    names = [f"model-{idx:05d}-of-{len(shards):05d}.safetensors" for idx in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS_FILE]
    else:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    done, told_percent = 0, 0
    for name, shard in zip(names, shards, strict=True):
        tensors = {}
        for tensor in shard:
            tensors[tensor.name] = _converted(gguf, tensor)
            done += tensor.num_bytes
            percent = 100 * done // needed
            if percent >= told_percent + 20:
                told_percent = percent
                progress(f"importing {gguf.path.name}: {percent} % of {needed / 1e6:.0f} MB")
        _save(tensors, folder / name)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error


def _split(planned: list[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    room = max_shard_bytes
    for tensor in planned:
        if tensor.num_bytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _converted(gguf: GgufFile, tensor: PlannedTensor) -> torch.Tensor:
    values = gguf.dequantized(tensor.source)
    if tensor.permuted_heads is not None:
        values = unpermute(values, tensor.permuted_heads)
    # A copy where `values` is a view of the mapped file, which torch warns about because it is read-only.
    return torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch.bfloat16)


def unpermute(weight: FloatArray, num_heads: int) -> FloatArray:
    """Return a query or key projection [num_heads * d, hidden] with each head's rows in Hugging Face's order."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
