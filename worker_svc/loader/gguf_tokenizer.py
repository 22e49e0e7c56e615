"""A GGUF file's byte-level BPE tokenizer as `tokenizer.json` and `tokenizer_config.json`.

GGUF stores vocabulary and merges, but of the pre-tokenizer (how text is cut in pieces before the merges) only a name,
so what the names mean is written here. It matters: cut differently, the same text gives other ids, and the model,
which never saw those in training, answers a little worse without any error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from worker_svc.loader.errors import GgufError
from worker_svc.loader.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # in tokenizer.ggml.token_type

# End-of-turn tokens that older files hold as control tokens without naming them as ends.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>"})

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """What a name in tokenizer.ggml.pre stands for."""

    pre_tokenizer: Callable[[], PreTokenizer]
    ignore_merges: bool = False  # a piece that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # where the file does not say


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    # Every digit (of any script, ½ and ² included) is cut off before the usual split sees the blanks in front of it.
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _llama3() -> PreTokenizer:
    return Sequence([Split(Regex(_LLAMA3_SPLIT), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


_SCHEMES = {
    "gpt-2": _Scheme(_gpt2),
    "smollm": _Scheme(_smollm),
    "llama-bpe": _Scheme(_llama3, ignore_merges=True, adds_bos=True),
    "llama3": _Scheme(_llama3, ignore_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class ImportedTokenizer:
    """The tokenizer and the names and ids of its special tokens."""

    tokenizer: Tokenizer
    config: dict[str, Any]  # tokenizer_config.json
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None

    def special_ids(self) -> dict[str, int | list[int]]:
        """Return the ids under the names that config.json and generation_config.json have for them."""
        eos: int | list[int] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else self.eos_token_ids
        ids = {"bos_token_id": self.bos_token_id, "eos_token_id": eos, "pad_token_id": self.pad_token_id}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}


def read_tokenizer(gguf: GgufFile, max_length: int) -> ImportedTokenizer:
    """Return the tokenizer; `max_length` is the context in tokens. Raises GgufError naming what is not supported."""
    scheme = _scheme(gguf)
    tokens = gguf.array("tokenizer.ggml.tokens")
    types = gguf.array("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise GgufError(f"{gguf.path}: {len(tokens)} tokens, but {len(types)} in tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]

    tokenizer = Tokenizer(_bpe(gguf, tokens, scheme))
    tokenizer.pre_tokenizer = scheme.pre_tokenizer()
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in user_defined])

    ids = {name: _special_id(gguf, key, tokens) for name, key in _SPECIAL_KEYS.items()}
    adds_bos = gguf.boolean("tokenizer.ggml.add_bos_token", scheme.adds_bos)
    adds_eos = gguf.boolean("tokenizer.ggml.add_eos_token", False)
    _add_ends(gguf, tokenizer, tokens, ids["bos_token"] if adds_bos else None, ids["eos_token"] if adds_eos else None)
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": [token for token in control if token not in names.values()],
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if gguf.has("tokenizer.chat_template"):
        config["chat_template"] = gguf.string("tokenizer.chat_template")
    return ImportedTokenizer(tokenizer, config, ids["bos_token"], _eos_ids(gguf, tokens, control), ids["pad_token"])


_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def _scheme(gguf: GgufFile) -> _Scheme:
    model = gguf.string("tokenizer.ggml.model")
    if model != "gpt2":
        raise GgufError(f"{gguf.path}: tokenizer.ggml.model {model} is not supported, only gpt2 (byte-level BPE)")
    name = gguf.string("tokenizer.ggml.pre")
    if name not in _SCHEMES:
        known = ", ".join(_SCHEMES)
        raise GgufError(f"{gguf.path}: pre-tokenizer {name} (tokenizer.ggml.pre) is not supported, only {known}")
    return _SCHEMES[name]


def _bpe(gguf: GgufFile, tokens: list[str], scheme: _Scheme) -> BPE:
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise GgufError(f"{gguf.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} tokens twice")
    merges = [tuple(merge.split(" ")) for merge in gguf.array("tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise GgufError(
                f"{gguf.path}: tokenizer.ggml.merges has {' '.join(merge)!r}, which is not a pair of tokens"
            )
    return BPE(vocab=vocabulary, merges=merges, ignore_merges=scheme.ignore_merges)


def _special_id(gguf: GgufFile, key: str, tokens: list[str]) -> int | None:
    if not gguf.has(key):
        return None
    token_id = gguf.integer(key)
    if token_id >= len(tokens):
        raise GgufError(f"{gguf.path}: {key} is {token_id}, and there are {len(tokens)} tokens")
    return token_id


def _eos_ids(gguf: GgufFile, tokens: list[str], control: list[str]) -> list[int]:
    """Return every token that ends an answer, the file's main one first."""
    main = _special_id(gguf, "tokenizer.ggml.eos_token_id", tokens)
    if main is None:
        raise GgufError(f"{gguf.path}: the metadata has no tokenizer.ggml.eos_token_id")
    others = [_special_id(gguf, f"tokenizer.ggml.{name}_token_id", tokens) for name in ("eot", "eom")]
    others += [tokens.index(token) for token in control if token in _TURN_ENDS]
    return list(dict.fromkeys([main, *(token_id for token_id in others if token_id is not None)]))


def _add_ends(gguf: GgufFile, tokenizer: Tokenizer, tokens: list[str], bos_id: int | None, eos_id: int | None) -> None:
    """Make the tokenizer put the given tokens around a text."""
    first = [] if bos_id is None else [(tokens[bos_id], bos_id)]
    last = [] if eos_id is None else [(tokens[eos_id], eos_id)]
    if not first and not last:
        return
    single = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[*first, *last])
