"""A tiny random model with a tokenizer of single characters, loaded as `quire eval` loads any other."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from quire.eval.loading import LoadedModel, load_model
from quire.eval.paged import PagedRows
from quire.eval.policies import read_policies
from quire.eval.results import Results
from quire.eval.session import Session
from tests.worker.models.checkpoints import VOCAB_SIZE, Saved, save

BLOCK_SIZE = 8
# As many characters as the tiny models have tokens, less the unknown one.
CHARS = [chr(code) for code in range(0x20, 0x7F)] + ["\n"]


@dataclass(frozen=True, slots=True)
class Tiny:
    """The model as `transformers` has it, and as the command does."""

    saved: Saved
    model: LoadedModel

    def rows(self) -> PagedRows:
        return PagedRows(self.model, BLOCK_SIZE)

    def session(self, policies: str, results: Results | None = None) -> Session:
        return Session(self.model, BLOCK_SIZE, read_policies(policies), results or Results(None))


def write_tokenizer(folder: Path) -> None:
    assert len(CHARS) + 1 == VOCAB_SIZE
    vocab = {char: idx + 1 for idx, char in enumerate(CHARS)} | {"<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_tiny(name: str, folder: Path) -> Tiny:
    saved = save(name, folder)
    write_tokenizer(folder)
    return Tiny(saved, load_model(str(folder), "float32", "cpu", print))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("llama-tied", tmp_path_factory.mktemp("tiny"))
