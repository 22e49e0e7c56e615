import functools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import ModelTokenizer
from tests.gateway.fakes import VOCAB_SIZE, end_token_id, make_byte_level_tokenizer

unhurried = settings(deadline=None)  # a busy machine is no failure
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXTS = ["the quick brown fox", "é", "你好", "👩‍🚀 go", "½ ² ٣", "日本", "<|end|>", " ", "\n\n33"]


@functools.cache
def byte_level() -> ModelTokenizer:
    return ModelTokenizer(make_byte_level_tokenizer())


@functools.cache
def byte_fallback() -> ModelTokenizer:
    """SentencePiece's way: a mark for blanks, and a token for each byte of what the vocabulary lacks."""
    words = ["<unk>", "▁", "▁the", "▁fox", "quick", "é", "a", "b", "."]
    vocab = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(
        {token: idx for idx, token in enumerate(vocab)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer)


def pieces_of(tokenizer: ModelTokenizer, token_ids: list[int], skip_special_tokens: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.silent_ids(skip_special_tokens))
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@unhurried
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_any_tokens_give_the_text_of_all_of_them(token_ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), token_ids)) == byte_level().decode(token_ids)


@unhurried
@given(st.lists(st.sampled_from(TEXTS), max_size=8).map("".join))
def test_text_comes_back_and_no_piece_is_broken(text: str) -> None:
    token_ids = make_byte_level_tokenizer().encode(text).ids
    pieces = pieces_of(byte_level(), token_ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@unhurried
@given(st.lists(st.integers(0, 9 + 255), max_size=40))
def test_byte_fallback_gives_the_text_where_it_is_whole(token_ids: list[int]) -> None:
    text = byte_fallback().decode(token_ids)
    streamed = "".join(pieces_of(byte_fallback(), token_ids))
    if REPLACEMENT not in text:
        assert streamed == text
    # Where bytes are broken `tokenizers` gives up the characters before them too, which a stream has sent already.
    assert streamed.replace(REPLACEMENT, "").startswith(text.split(REPLACEMENT)[0])


@unhurried
@given(st.lists(st.sampled_from(["▁the", "▁fox", "é", "<0xE4>|<0xBD>|<0xA0>", "<0xC3>|<0xA9>", "."]), max_size=12))
def test_byte_fallback_never_sends_a_broken_character(words: list[str]) -> None:
    tokenizer = byte_fallback()
    ids = {tokenizer.token_string(token_id): token_id for token_id in range(9 + 256)}
    token_ids = [ids[part] for word in words for part in word.split("|")]
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@unhurried
@given(st.lists(st.sampled_from(["the", " quick", "<|end|>", "<|start|>", "é"]), max_size=20))
def test_special_tokens_are_skipped(words: list[str]) -> None:
    token_ids = make_byte_level_tokenizer().encode("".join(words)).ids
    expected = "".join(word for word in words if not word.startswith("<|"))
    assert "".join(pieces_of(byte_level(), token_ids, skip_special_tokens=True)) == expected


@unhurried
@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
def test_continued_text_goes_on_where_it_ended(continued_ids: list[int], token_ids: list[int]) -> None:
    tokenizer = byte_level()
    before = tokenizer.decode(continued_ids)
    assume(not before.endswith(REPLACEMENT))
    detokenizer = Detokenizer(tokenizer.decode, tokenizer.silent_ids(False), continued_ids)
    pieces = [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]
    assert before + "".join(pieces) == tokenizer.decode(continued_ids + token_ids)


def test_first_blank_is_kept_where_a_text_is_continued() -> None:
    tokenizer = byte_fallback()
    ids = {tokenizer.token_string(token_id): token_id for token_id in range(9 + 256)}
    silent_ids = tokenizer.silent_ids(False)
    assert Detokenizer(tokenizer.decode, silent_ids).push(ids["▁fox"]) == "fox"
    you = ["<0xE4>", "<0xBD>", "<0xA0>"]
    for continued in (["▁the"], ["▁the", "▁"], ["▁", "quick", "a", "b", ".", "▁the"], you, you * 2, ["é", *you]):
        detokenizer = Detokenizer(tokenizer.decode, silent_ids, [ids[token] for token in continued])
        assert detokenizer.push(ids["▁fox"]) == " fox"


def test_text_that_ends_within_a_character_is_not_continued() -> None:
    *broken, last = make_byte_level_tokenizer().encode("你").ids
    detokenizer = Detokenizer(byte_level().decode, byte_level().silent_ids(False), broken)
    assert [detokenizer.push(last), *map(detokenizer.push, byte_level_ids("a你"))][-3:] == ["", "", "你"]


def byte_level_ids(text: str) -> list[int]:
    return list(make_byte_level_tokenizer().encode(text).ids)


def test_character_is_sent_with_its_last_byte() -> None:
    token_ids = make_byte_level_tokenizer().encode("你").ids
    assert len(token_ids) == 3
    assert pieces_of(byte_level(), token_ids) == ["", "", "你", ""]


def test_incomplete_character_is_flushed_at_the_end() -> None:
    token_ids = make_byte_level_tokenizer().encode("a你").ids[:-1]
    assert pieces_of(byte_level(), token_ids) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("text", ["😀", "é", "你"])
def test_endless_broken_bytes_are_neither_held_nor_kept(text: str) -> None:
    broken = make_byte_level_tokenizer().encode(text).ids[:-1]
    longest_window = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest_window
        longest_window = max(longest_window, len(token_ids))
        return byte_level().decode(token_ids)

    detokenizer = Detokenizer(decode, byte_level().silent_ids(False))
    pieces = [detokenizer.push(token_id) for token_id in broken * 200]
    assert len("".join(pieces)) > 190
    assert longest_window < 20
    assert "".join([*pieces, detokenizer.flush()]) == byte_level().decode(broken * 200)


def test_endless_special_tokens_are_not_kept() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return byte_level().decode(token_ids)

    detokenizer = Detokenizer(decode, byte_level().silent_ids(True))
    assert [detokenizer.push(end_token_id()) for _ in range(1000)] == [""] * 1000
    assert num_decoded == 0
