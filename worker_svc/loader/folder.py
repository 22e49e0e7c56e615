"""What a Hugging Face model folder holds, as far as its file names go (no torch: also used where no tensor is read)."""

import json
from pathlib import Path

from worker_svc.loader.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_index(folder: Path) -> dict[str, str]:
    """Return where a sharded checkpoint's tensors lie: tensor name -> file name. Empty for a checkpoint in one file.

    Raises CheckpointError when there are no weights, or the index is damaged.
    """
    path = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return {}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        shard_of = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except FileNotFoundError:
        raise CheckpointError(f"no weights in {folder}: neither {WEIGHTS_FILE} nor {INDEX_FILE}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"damaged weights index {path}: {error!r}") from error
    for shard in shard_of.values():
        if Path(shard).name != shard:
            raise CheckpointError(f"damaged weights index {path}: {shard!r} is not a file of the folder")
    return shard_of


def weight_paths(folder: Path) -> list[Path]:
    """Return the weights files of a model folder, in the order of their names.

    Raises CheckpointError, which names the file, when one is missing or the index is damaged.
    """
    paths = [folder / name for name in sorted(set(read_index(folder).values()) or {WEIGHTS_FILE})]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"missing weights file {path}, which {INDEX_FILE} names")
    return paths
