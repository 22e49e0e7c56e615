"""The model that is measured, loaded as a worker loads it, and its tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kernels.dispatch import Backend, backend_for
from quire.eval.errors import EvalMistakeError
from worker_svc.assembly import read_config
from worker_svc.device import choose_device, choose_dtype, find_gpus, use_device
from worker_svc.loader.checkpoint import Checkpoint
from worker_svc.loader.errors import ModelError
from worker_svc.loader.fingerprint import fingerprint
from worker_svc.loader.resolve import Progress, resolve_model
from worker_svc.models.config import ModelConfig
from worker_svc.models.decoder import Decoder

_TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """Text to token ids and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A model folder may carry the truncation and padding of its training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.prefix: list[int] = tokenizer.encode("", add_special_tokens=True).ids  # what every text begins with

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without the prefix."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that a task needs of the model."""

    name: str
    fingerprint: str  # hexadecimal
    config: ModelConfig
    decoder: Decoder
    backend: Backend
    codec: TextCodec


def load_model(model: str, dtype: str, device: str, progress: Progress) -> LoadedModel:
    """Return the model that `--model` names, its weights in `dtype` on the device.

    Raises ModelError, StartupError or KernelError: each is one line for a person.
    """
    target = choose_device(device, find_gpus())
    backend = backend_for(target)
    use_device(target)
    folder = resolve_model(model, progress)
    config = read_config(folder)
    codec = TextCodec(_read_tokenizer(folder))
    decoder = Decoder.load(config, Checkpoint(folder), choose_dtype(dtype), target)
    name = folder.name if Path(model).expanduser().is_dir() else model
    return LoadedModel(name, fingerprint(folder).hex(), config, decoder, backend, codec)


def check_length(model: LoadedModel, num_tokens: int, flags: str) -> None:
    """Raise EvalMistakeError, naming the flags, where a sequence would outgrow the model."""
    limit = model.config.max_position_embeddings
    if num_tokens > limit:
        raise EvalMistakeError(f"{flags}: {num_tokens} tokens, and the model was made for {limit}")


def use_threads(num_threads: int | None) -> None:
    """Have torch and the kernels compute on so many threads; None: as many as the environment says."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / _TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(f"the model folder has no {_TOKENIZER_FILE}: {folder}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
