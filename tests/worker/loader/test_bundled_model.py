"""The bundled model, imported: it tokenizes as in training, and `transformers` loads it and gets sense out of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.worker.loader.byte_level_bpe import BytePairs
from worker_svc.loader.checkpoint import Checkpoint

# A text; the pieces it must be cut into: every digit alone first, then GPT-2's rule (a word with the blank before it, a
# run of punctuation likewise, blanks without the last one when a word follows); and the ids of those pieces, derived
# by hand from vocabulary and merges.
CUT_TEXTS: list[tuple[str, list[str], list[int]]] = [
    ("   42", ["   ", "4", "2"], [333, 36, 34]),
    (" 42", [" ", "4", "2"], [216, 36, 34]),
    ("\n\n33", ["\n\n", "3", "3"], [1116, 35, 35]),
    ("½ ² ٣", ["½", " ", "²", " ", "٣"], [16738, 216, 19133, 216, 164, 113]),
    ("x²+1", ["x", "²", "+", "1"], [104, 19133, 27, 33]),
    (
        "In 2024, pi is 3.14",
        ["In", " ", "2", "0", "2", "4", ",", " pi", " is", " ", "3", ".", "1", "4"],
        [788, 216, 34, 32, 34, 36, 28, 16916, 314, 216, 35, 30, 33, 36],
    ),
    (
        "Hello 👋🏽 world 🎉",
        ["Hello", " 👋🏽", " world", " 🎉"],
        [19556, 15107, 235, 229, 10813, 233, 138, 905, 15107, 232, 227],
    ),
    (
        "👨\u200d👩\u200d👧",
        ["👨\u200d👩\u200d👧"],
        [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
    ),
    ("你好，世界", ["你好", "，", "世界"], [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230]),
    (
        "東京は2020年",
        ["東京は", "2", "0", "2", "0", "年"],
        [30679, 126, 16736, 122, 7365, 124, 34, 32, 34, 32, 32090, 129],
    ),
    ("한국어", ["한국어"], [33085, 246, 181, 130, 251, 183, 240, 129]),
    (
        "def f(x):\n    return x[0] == 'a'\n",
        ["def", " f", "(", "x", "):", "\n   ", " return", " x", "[", "0", "]", " ==", " '", "a", "'", "\n"],
        [1604, 275, 24, 104, 727, 472, 1003, 1792, 75, 32, 77, 1758, 637, 81, 23, 198],
    ),
    (
        "\tif (a<=b) {\n\t\ti++;\n\t}",
        ["\t", "if", " (", "a", "<=", "b", ")", " {", "\n\t", "\t", "i", "++;", "\n", "\t", "}"],
        [197, 342, 365, 81, 44, 45, 82, 25, 1662, 3354, 197, 89, 11444, 43, 198, 197, 109],
    ),
    ("a" + " " * 20 + "b", ["a", " " * 19, " b"], [81, 42185, 278]),
    (" " * 100, [" " * 100], [40686, 12427, 289]),
    ("don't we'll I'VE", ["don", "'t", " we", "'ll", " I", "'", "VE"], [12420, 982, 392, 3060, 339, 23, 18525]),
    ("naïve café", ["naïve", " café"], [3546, 46494, 37366]),
    ("e\u0301", ["e", "\u0301"], [85, 151, 219]),
    ("a \n b", ["a", " \n", " b"], [81, 3717, 278]),
    ("trailing  ", ["trailing", "  "], [4861, 4966, 256]),
]


@pytest.fixture(scope="session")
def tokenizer(bundled_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bundled_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_pairs(bundled_folder: Path) -> BytePairs:
    model = json.loads((bundled_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    return BytePairs(model["vocab"], [(left, right) for left, right in model["merges"]])


def hf_config(folder: Path, name: str) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return contents


@pytest.mark.parametrize(
    ("text", "pieces", "expected_ids"), CUT_TEXTS, ids=[repr(text)[:30] for text, _, _ in CUT_TEXTS]
)
def test_text_gets_the_ids_that_the_model_was_trained_on(
    tokenizer: Tokenizer, byte_pairs: BytePairs, text: str, pieces: list[str], expected_ids: list[int]
) -> None:
    assert "".join(pieces) == text
    assert [token_id for piece in pieces for token_id in byte_pairs.ids(piece)] == expected_ids
    assert tokenizer.encode(text).ids == expected_ids
    assert tokenizer.decode(expected_ids) == text


def test_control_tokens_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\nHi 5<|im_end|>\n").ids == [1, 4093, 198, 26843, 216, 37, 2, 198]
    assert tokenizer.encode("<|endoftext|><repo_name>a").ids == [0, 3, 81]
    assert tokenizer.decode([1, 4093, 2]) == "user"


def test_nothing_is_put_around_a_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("").ids == []


def test_config_has_the_models_shape(bundled_folder: Path) -> None:
    config = hf_config(bundled_folder, "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    assert hf_config(bundled_folder, "generation_config.json")["eos_token_id"] == 2


def test_weights_are_all_there(bundled_folder: Path) -> None:
    checkpoint = Checkpoint(bundled_folder)
    assert len(checkpoint.names()) == 2 + 30 * 9
    tensors = [checkpoint.tensor(name) for name in checkpoint.names()]
    assert sum(tensor.numel() for tensor in tensors) == 134_515_008
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def test_transformers_gets_the_capital_of_france_from_the_folder(bundled_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder)
    model = AutoModelForCausalLM.from_pretrained(bundled_folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_transformers_tokenizes_the_same(bundled_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder)
    for text, _, expected_ids in CUT_TEXTS:
        assert tokenizer(text)["input_ids"] == expected_ids
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
