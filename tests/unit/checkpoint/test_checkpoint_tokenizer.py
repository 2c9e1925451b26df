"""GGUF vocabularies as tokenizers: SentencePiece's merging rule, byte fallback, pre-tokenizers,
special tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TokenType
from tokenizers import Tokenizer

from setpoint.checkpoint.gguf import tokenizer_files as gguf_tokenizer
from setpoint.checkpoint.gguf.byte_level import splitting
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from setpoint.core.errors import CheckpointError
from setpoint_testing import tiny_gguf

MODEL = tiny_gguf.TinyLlama()


def build(
    path: Path, keys: dict[str, Any], log: Callable[[str], None] = lambda line: None
) -> Tokenizer:
    tiny_gguf.write(path / "m.gguf", {}, tiny_gguf.metadata(MODEL) | keys)
    with GGUFFile(path / "m.gguf") as file:
        tokens = gguf_tokenizer.read_tokens(file, 10**6)
        gguf_tokenizer.write(file, tokens, path, context_len=64, log=log)
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def sentencepiece_keys(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.CONTROL,
        *[TokenType.BYTE] * 256,
        *[TokenType.NORMAL] * len(pieces),
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.add_bos_token": True,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def merge_by_score(text: str, pieces: dict[str, float]) -> list[str]:
    """SentencePiece's definition: merge the neighbours whose concatenation scores highest, the
    leftmost first, until none is left."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = enumerate(itertools.pairwise(symbols))
        options = [
            (-pieces[left + right], at) for at, (left, right) in pairs if left + right in pieces
        ]
        if not options:
            break
        _, at = min(options)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        piece
        for symbol in symbols
        for piece in (
            [symbol] if symbol in pieces else (f"<0x{byte:02X}>" for byte in symbol.encode())
        )
    ]


def test_sentencepiece_merges_by_score_as_defined(tmp_path: Path) -> None:
    rng = random.Random(0)
    words = {"".join(rng.choices("abc▁", k=length)) for length in range(2, 7) for _ in range(60)}
    order = [*"abc▁", *sorted(words)]
    rng.shuffle(order)
    pieces = {text: -float(rank) for rank, text in enumerate(order)}
    tokenizer = build(tmp_path, sentencepiece_keys(pieces))
    for _ in range(500):
        text = "".join(rng.choices("abc dé", k=rng.randint(1, 30)))
        assert tokenizer.encode(text).tokens == ["<s>", *merge_by_score(text, pieces)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_equal_scores_leave_the_order_to_the_ids(tmp_path: Path) -> None:
    """Files that were converted without tokenizer.model have one score for all tokens."""
    order = ["▁▁", "bc", "ab", "▁a", "▁", "a", "b", "c"]
    true = {text: -float(rank) for rank, text in enumerate(order)} | {"▁▁": -100.0}
    keys = sentencepiece_keys(true)
    keys["tokenizer.ggml.scores"] = [-1000.0] * len(keys["tokenizer.ggml.tokens"])
    lines: list[str] = []
    tokenizer = build(tmp_path, keys, log=lines.append)
    assert "the same score for all tokens" in lines[0]
    for text in ("abc", " a", "   abca", "aabbcc"):
        assert tokenizer.encode(text).tokens == ["<s>", *merge_by_score(text, true)], text


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([*"ab", "ab" * 100_000], "token 261 has 200000 characters"),
        (["a" * length for length in range(1, 500)], "more than 16777216 characters"),
    ],
)
def test_one_vocabulary_does_not_cost_gigabytes(
    tmp_path: Path, texts: list[str], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        build(tmp_path, sentencepiece_keys(dict.fromkeys(texts, -1.0)))


def test_sentencepiece_without_space_prefix_or_bos(tmp_path: Path) -> None:
    pieces = {"a": -1.0, "▁": -2.0, "▁a": -3.0}
    tokenizer = build(
        tmp_path, sentencepiece_keys(pieces, add_space_prefix=False, add_bos_token=False)
    )
    assert tokenizer.encode("a a").tokens == ["a", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


def test_sentencepiece_defaults_are_the_familys(tmp_path: Path) -> None:
    keys = sentencepiece_keys({"▁": -1.0, "a": -2.0})
    del keys["tokenizer.ggml.add_bos_token"]
    base = {key: value for key, value in tiny_gguf.metadata(MODEL).items() if "_token" not in key}
    tiny_gguf.write(tmp_path / "m.gguf", {}, base | keys)
    with GGUFFile(tmp_path / "m.gguf") as file:
        tokens = gguf_tokenizer.read_tokens(file, 10**6)
        gguf_tokenizer.write(file, tokens, tmp_path, context_len=64, log=lambda line: None)
    assert (tokens.unk, tokens.bos, tokens.eos, tokens.stops) == (0, 1, 2, (2,))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").tokens == [
        "<s>",
        "▁",
        "a",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"scores": [0.0]}, "1 scores"),
    ],
)
def test_sentencepiece_variants_that_are_not_known_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        build(tmp_path, sentencepiece_keys({"a": -1.0}, **change))


WORDS = {
    "gpt-2": ["I", "'ll", "Ġtake", "Ġ2026", "Ġ(", "x", ");", "ĊĊ", "Ġok", "ĠĠ"],
    "smollm": ["I", "'ll", "Ġtake", "Ġ", "2", "0", "2", "6", "Ġ(", "x", ");", "ĊĊ", "Ġok", "ĠĠ"],
    "llama-bpe": ["I", "'ll", "Ġtake", "Ġ", "202", "6", "Ġ(", "x", ");ĊĊ", "Ġok", "ĠĠ"],
    "qwen2": ["I", "'ll", "Ġtake", "Ġ", "2", "0", "2", "6", "Ġ(", "x", ");ĊĊ", "Ġok", "ĠĠ"],
    "default": ["I", "'", "ll", "Ġtake", "Ġ", "202", "6", "Ġ", "(", "x", ");", "ĊĊ", "Ġok", "ĠĠ"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_pre_tokenizers_cut_where_their_models_do(pre: str) -> None:
    pieces = splitting(PRE_TOKENIZERS[pre]).pre_tokenize_str("I'll take 2026 (x);\n\n ok  ")
    assert [text for text, _ in pieces] == WORDS[pre]


def test_llama3_takes_a_whole_word_before_merging(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.merges": ["l l"],
        "tokenizer.ggml.add_bos_token": False,
    }  # no merges lead to "hello"
    assert build(tmp_path, keys | {"tokenizer.ggml.pre": "llama-bpe"}).encode("hello").tokens == [
        "hello"
    ]
    assert build(tmp_path, keys | {"tokenizer.ggml.pre": "gpt-2"}).encode("hello").tokens == [
        "h",
        "e",
        "ll",
        "o",
    ]


def test_borders_follow_the_file(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = build(tmp_path, keys)
    assert tokenizer.encode("h").tokens == ["<|im_start|>", "h", "<|im_end|>"]
    assert tokenizer.encode("h", add_special_tokens=False).tokens == ["h"]


def test_special_and_user_defined_tokens_are_never_split(tmp_path: Path) -> None:
    texts = tiny_gguf.byte_vocabulary(MODEL.vocab_size)
    kinds = tiny_gguf.metadata(MODEL)["tokenizer.ggml.token_type"]
    kinds[-1] = int(TokenType.USER_DEFINED)
    tokenizer = build(tmp_path, {"tokenizer.ggml.token_type": kinds})
    encoded = tokenizer.encode(f"hello<|im_end|>{texts[-1]}{texts[-2]}")
    assert encoded.tokens[:3] == ["hello", "<|im_end|>", texts[-1]]
    assert texts[-2] not in encoded.tokens
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == f"hello{texts[-1]}{texts[-2]}"


def test_qwen2_composes_accents(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, {"tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_a_file_without_template_or_pre_tokenizer_says_so(tmp_path: Path) -> None:
    keys = {
        key: value
        for key, value in tiny_gguf.metadata(MODEL).items()
        if key not in ("tokenizer.chat_template", "tokenizer.ggml.pre")
    }
    tiny_gguf.write(tmp_path / "m.gguf", {}, keys)
    lines: list[str] = []
    with GGUFFile(tmp_path / "m.gguf") as file:
        gguf_tokenizer.write(
            file,
            gguf_tokenizer.read_tokens(file, 10**6),
            tmp_path,
            context_len=64,
            log=lines.append,
        )
    assert ["pre-tokenizer" in lines[0], "chat template" in lines[1]] == [True, True]
    assert not (tmp_path / "chat_template.jinja").exists()


def test_the_tokenizer_config_names_the_roles(tmp_path: Path) -> None:
    build(tmp_path, {})
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        None,
    )
    assert (tmp_path / "chat_template.jinja").read_text() == tiny_gguf.CHAT_TEMPLATE
