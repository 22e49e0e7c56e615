"""Tokenizers out of GGUF files: special tokens, tokens around a text, and pre-tokenizers by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.worker.loader.gguf_files import TOKENS, TYPES, write_llama
from worker_svc.loader.errors import GgufError
from worker_svc.loader.gguf_file import GgufFile
from worker_svc.loader.gguf_tokenizer import ImportedTokenizer, read_tokenizer


def read(tmp_path: Path, changes: dict[str, Any] | None = None) -> ImportedTokenizer:
    return read_tokenizer(GgufFile(write_llama(tmp_path / "m.gguf", changes)), 128)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


def test_control_and_user_defined_tokens_are_single_tokens(tmp_path: Path) -> None:
    tokenizer = read(tmp_path).tokenizer
    assert tokens_of(tokenizer, "a<s>b<tool>c</s>") == ["a", "<s>", "b", "<tool>", "c", "</s>"]


def test_only_control_tokens_are_left_out_of_text(tmp_path: Path) -> None:
    tokenizer = read(tmp_path).tokenizer
    assert tokenizer.decode(tokenizer.encode("a<s>b<tool>c").ids) == "ab<tool>c"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["abc"]),
        ({"tokenizer.ggml.add_bos_token": False}, ["abc"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["<s>", "abc"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["abc", "</s>"]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, ["<s>", "abc", "</s>"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["<s>", "abc"]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, ["abc"]),
    ],
)
def test_tokens_around_a_text_are_as_the_file_says(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    imported = read(tmp_path, changes)
    assert tokens_of(imported.tokenizer, "abc") == expected
    assert imported.config["add_bos_token"] == (expected[0] == "<s>")
    assert imported.tokenizer.encode("abc", add_special_tokens=False).tokens == ["abc"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ1", "2", "3", "0"]),
        ("smollm", ["a", "Ġ", "Ġ", "1", "2", "3", "0"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "123", "0"]),
    ],
)
def test_pre_tokenizer_decides_how_digits_are_cut(tmp_path: Path, name: str, expected: list[str]) -> None:
    changes = {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*TOKENS, "Ġ1", "12", "123"],
        "tokenizer.ggml.token_type": [*TYPES, 1, 1, 1],
        "tokenizer.ggml.merges": ["Ġ 1"],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert tokens_of(read(tmp_path, changes).tokenizer, "a  1230") == expected


def test_llama3_takes_whole_pieces_from_the_vocabulary(tmp_path: Path) -> None:
    # No merge leads to "bc", which is a token all the same.
    changes = {"tokenizer.ggml.add_bos_token": False}
    assert tokens_of(read(tmp_path, {**changes, "tokenizer.ggml.pre": "llama-bpe"}).tokenizer, "bc") == ["bc"]
    assert tokens_of(read(tmp_path, {**changes, "tokenizer.ggml.pre": "gpt-2"}).tokenizer, "bc") == ["b", "c"]


def test_every_token_that_ends_a_turn_is_an_end(tmp_path: Path) -> None:
    tokens = [*TOKENS, "<|eot_id|>", "<|eom_id|>"]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*TYPES, 3, 3]}
    imported = read(tmp_path, {**changes, "tokenizer.ggml.eom_token_id": len(TOKENS) + 1})
    assert imported.eos_token_ids == [1, len(TOKENS) + 1, len(TOKENS)]
    assert imported.special_ids() == {"bos_token_id": 0, "eos_token_id": imported.eos_token_ids}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model llama is not supported"),
        ({"tokenizer.ggml.pre": "falcon"}, "pre-tokenizer falcon .* is not supported, only gpt-2, smollm"),
        ({"tokenizer.ggml.merges": ["a b", "a z"]}, "tokenizer.ggml.merges has 'a z'"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges has 'a b c'"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "a"]}, "tokenizer.ggml.tokens has 1 tokens twice"),
        ({"tokenizer.ggml.token_type": TYPES[:-1]}, "in tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": 500}, "tokenizer.ggml.eos_token_id is 500"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        read(tmp_path, changes)


def test_chat_template_is_kept_where_there_is_one(tmp_path: Path) -> None:
    assert "chat_template" not in read(tmp_path).config
    template = "{{ messages[0]['content'] }}\n"
    config = read(tmp_path, {"tokenizer.chat_template": template}).config
    assert json.loads(json.dumps(config))["chat_template"] == template
