"""Writes the Hugging Face files of one GGUF model into a folder: config, tokenizer, weights in bf16."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_svc.loader.errors import GgufError
from worker_svc.loader.folder import CONFIG_FILE, GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from worker_svc.loader.gguf_config import read_config
from worker_svc.loader.gguf_file import GgufFile
from worker_svc.loader.gguf_tokenizer import read_tokenizer
from worker_svc.loader.gguf_weights import plan_tensors, write_weights


def convert(path: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model of the GGUF file `path` into the existing `folder`.

    What can be refused is refused before the first byte of weights is written. Raises GgufError naming the key or
    tensor, and OSError when the folder cannot be written.
    """
    progress(f"importing {path.name}: reading its metadata")
    gguf = GgufFile(path)
    config = read_config(gguf)
    planned = plan_tensors(gguf, config)
    imported = read_tokenizer(gguf, config.max_position_embeddings)
    if imported.tokenizer.get_vocab_size() > config.vocab_size:
        raise GgufError(
            f"{path}: {imported.tokenizer.get_vocab_size()} tokens, but embeddings for {config.vocab_size} only"
        )
    special_ids = imported.special_ids()
    _write_json(folder / CONFIG_FILE, {**config.to_hf(), **special_ids})
    _write_json(folder / GENERATION_CONFIG_FILE, special_ids)
    _write_json(folder / TOKENIZER_CONFIG_FILE, imported.config)
    imported.tokenizer.save(str(folder / TOKENIZER_FILE))
    write_weights(gguf, planned, folder, progress)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
