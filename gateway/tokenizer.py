"""The model's tokenizer, read from its folder: text to token ids, token ids to text, and the bytes of single tokens."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from gateway.errors import InvalidRequestError, StartupError

# Shorter texts are encoded at once (some hundred microseconds); longer ones in a thread, beside the streams.
_LONG_TEXT_CHARS = 4096


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: a printable character for each byte (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


class ModelTokenizer:
    """A `tokenizers.Tokenizer` and what a server must know of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A model folder may carry the truncation and padding of its training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._texts_of_one: dict[int, str] = {}
        self._strings: dict[int, str] = {token_id: string for string, token_id in vocab.items()}
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        kinds = _decoder_kinds(json.loads(tokenizer.to_str())["decoder"])
        # A normalizer may shorten a text by any amount.
        self._longest_token_chars = max(map(len, vocab), default=1) if tokenizer.normalizer is None else None
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self._has_blank_mark = bool(kinds & {"Replace", "Metaspace"})

    @classmethod
    def load(cls, folder: Path) -> "ModelTokenizer":
        """Read `tokenizer.json`. Raises StartupError when it is missing or broken."""
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise StartupError(
                f"--model {folder}: no such folder "
                f"(`python -m worker_svc.loader {folder}` fetches a model and prints its folder)"
            )
        if not path.is_file():
            raise StartupError(f"--model {folder}: the folder has no tokenizer.json")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path}: {str(error).splitlines()[0]}") from error

    def min_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` cannot have less of, found without tokenizing it."""
        return len(text) // self._longest_token_chars if self._longest_token_chars else 0

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Return the token ids of `text`. Raises InvalidRequestError, naming `param`, for text that has none."""
        try:
            if len(text) < _LONG_TEXT_CHARS:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            encodings = await asyncio.to_thread(
                self._tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens
            )
            return list(encodings[0].ids)
        except Exception as error:  # a word outside a vocabulary without an unknown token: bare Exception
            raise InvalidRequestError(f"The text cannot be tokenized: {error}", param) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included; ids that are no token have none."""
        # A detokenizer asks for single tokens as often as for anything else.
        if len(token_ids) == 1:
            token_id = token_ids[0]
            text = self._texts_of_one.get(token_id)
            if text is None:
                text = self._texts_of_one[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def token_string(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it, "" for an id that is no token."""
        return self._strings.get(token_id, "")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's own bytes, which need not be a whole character."""
        string = self._strings.get(token_id, "")
        if token_id in self._added_ids:
            return string.encode()
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in string):
            return bytes(_BYTE_OF_CHAR[char] for char in string)
        if self._has_byte_fallback and len(string) == 6 and string.startswith("<0x"):
            return bytes([int(string[3:5], 16)])
        if self._has_blank_mark:
            return string.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return string.encode()

    def token_text(self, token_id: int) -> str:
        """Return the token's text by itself, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def silent_ids(self, skip_special_tokens: bool) -> "SilentIds":
        """Return the ids that have no text."""
        return SilentIds(self._strings, self.special_ids if skip_special_tokens else frozenset())


class SilentIds:
    """Ids without a text: those that are no token, and the special tokens that are to be skipped."""

    def __init__(self, tokens: dict[int, str], skipped: frozenset[int]) -> None:
        self._tokens, self._skipped = tokens, skipped

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._skipped or token_id not in self._tokens


def _decoder_kinds(decoder: dict[str, object] | None) -> set[str]:
    """Return the types of a decoder and of its parts, as tokenizer.json names them."""
    if decoder is None:
        return set()
    kinds = {str(decoder["type"])}
    parts = decoder.get("decoders")
    for part in parts if isinstance(parts, list) else ():
        kinds |= _decoder_kinds(part)
    return kinds
