"""Byte-level vocabularies of GGUF files against tokenizers that were trained and kept as Hugging
Face's tokenizer.json keeps them: ids are equal on texts that are hard to split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from setpoint.checkpoint.gguf import tokenizer_files as gguf_tokenizer
from setpoint.checkpoint.gguf.byte_level import splitting
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from setpoint.frontend.text.template_source import find_chat_template
from setpoint_testing import tiny_gguf

CONTROL = ("<|begin|>", "<|end|>", "<|user|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "  \t<odd>  ")
CORPUS = [
    "def f(x):\n\tif x>=10_000:\r\n        return {'k': [1, 2.50, -3e8]}  # ok?\n\n\n    pass\n",
    "I'll WON'T she'D they'Ve HTTPServerError iPhone15 camelCaseWords ALLCAPS3x snake_case",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ñandú e\u0301 é Ａ１ ﬁ Straße ĲSSEL İstanbul ǅ",
    "漢字かなカナ，中文。한국어 ㄱㅏ ไทย हिन्दी العربية، ۱۲۳ עברית",
    "1 12 123 1234 1234567890 1,234,567.89 ½ ² Ⅷ ١٢٣٤ 0x1F",
    "   leading, trailing   \t \t\n \n  \u00a0\u2003\u3000 \x0b end   ",
    'a/b\\c //x --y ++z ((())) ... !!! ?!\n/path/to\n<a href="#">&amp;</a> $x^2$ `q` ~|~',
    "",
    " ",
    "\n",
]


def split(*patterns: str) -> pre.PreTokenizer:
    own = [pre.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns]
    return pre.Sequence([*own, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def digits_then_words() -> pre.PreTokenizer:
    return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
AS_IN_TOKENIZER_JSON: dict[str, Callable[[], pre.PreTokenizer]] = {
    "gpt-2": lambda: pre.ByteLevel(add_prefix_space=False),
    "olmo": lambda: pre.ByteLevel(add_prefix_space=False),
    "smollm": digits_then_words,
    "starcoder": digits_then_words,
    "command-r": digits_then_words,
    "llama-bpe": lambda: split(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
    ),
    "glm4": lambda: split(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
    ),
    "qwen2": lambda: split(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
    ),
    "qwen35": lambda: split(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{END}"
    ),
    "seed-coder": lambda: split(
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
        rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{END}"
    ),
    "tekken": lambda: split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"
    ),
    "gpt-4o": lambda: split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        rf"{CONTRACTIONS}?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"
    ),
    "deepseek-v3": lambda: split(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        rf"|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
    ),
    "deepseek-coder": lambda: split(
        "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"
    ),
    "bloom": lambda: split(r" ?[^(\s|.,!?…。，、।۔،)]+"),
    "falcon": lambda: pre.Sequence(
        [
            pre.Split(Regex(r"[\p{P}\$\+<=>\^~\|`]+"), "isolated"),
            pre.ByteLevel(add_prefix_space=False),
            pre.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
}
"""Makes the pre-tokenizer of each kind, as the tokenizer.json of such a model has it."""
COMPOSED = ("olmo", "qwen2", "qwen35", "command-r")
WHOLE_WORDS = ("llama-bpe", "glm4", "tekken")


def trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in WHOLE_WORDS))
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = AS_IN_TOKENIZER_JSON[name]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in USER_DEFINED])
    return tokenizer


def converted(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    base = tiny_gguf.metadata(tiny_gguf.TinyLlama())
    tiny_gguf.write(folder / "m.gguf", {}, base | keys)
    with GGUFFile(folder / "m.gguf") as file:
        tokens = gguf_tokenizer.read_tokens(file, 10**6)
        gguf_tokenizer.write(file, tokens, folder, context_len=64, log=lambda line: None)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def kind_of(text: str) -> int:
    if text in CONTROL:
        return int(TokenType.CONTROL)
    return int(TokenType.USER_DEFINED if text in USER_DEFINED else TokenType.NORMAL)


def keys_of(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter would write of a tokenizer."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [kind_of(text) for text in texts],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.add_bos_token": False,
    }


def hard_texts() -> list[str]:
    added = [*CONTROL, *USER_DEFINED]
    inside = [f"{text[:9]}{token}{text[9:]}{token}" for text in CORPUS[:7] for token in added]
    return [*CORPUS, *inside, "".join(added), " ".join(added)]


@pytest.mark.parametrize("name", AS_IN_TOKENIZER_JSON)
def test_ids_are_those_of_the_models_own_tokenizer(tmp_path: Path, name: str) -> None:
    theirs = trained(name)
    ours = converted(tmp_path, keys_of(theirs, name))
    for text in hard_texts():
        found = ours.encode(text)
        assert found.ids == theirs.encode(text).ids, (text, found.tokens)
        for skip in (True, False):
            decoded = ours.decode(found.ids, skip_special_tokens=skip)
            assert decoded == theirs.decode(found.ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_words_are_all_of_the_text(name: str) -> None:
    alphabet = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in CORPUS:
        words = [word for word, _ in splitting(PRE_TOKENIZERS[name]).pre_tokenize_str(text)]
        whole = "".join(word for word, _ in alphabet.pre_tokenize_str(text))
        assert "".join(words) == whole


def test_digits_of_kimi_tiny_aya_and_superbpe() -> None:
    for name, words in {
        "kimi-k2": ["123", "4", " ", "漢字", "かな"],
        "tiny_aya": ["1", "234", " 漢字かな"],
        "superbpe": ["1", "234", " 漢字かな"],
        "viking": ["1", "2", "3", "4", " 漢字かな"],
    }.items():
        text = "1234 漢字かな"
        found = splitting(PRE_TOKENIZERS[name]).pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in found] == words, name


def sentencepiece(folder: Path, *, arch: str = "llama", **more: Any) -> Tokenizer:
    """A vocabulary as Gemma's: runs of spaces and of line breaks are user-defined."""
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL}
    special |= {"</s>": TokenType.USER_DEFINED, "<|user|>": TokenType.CONTROL}  # as Phi-3 has them
    special |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    special |= dict.fromkeys(("\n", "\n\n", "  ", "   ", "\t"), TokenType.USER_DEFINED)
    pieces = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc"]
    keys = {
        "tokenizer.ggml.model": "llama",
        "general.architecture": arch,
        "tokenizer.ggml.tokens": [*special, *pieces],
        "tokenizer.ggml.token_type": [int(kind) for kind in special.values()]
        + [int(TokenType.NORMAL)] * len(pieces),
        "tokenizer.ggml.scores": [-1000.0] * len(special) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.add_bos_token": False,
    }
    return converted(folder, keys | more)


def test_gemmas_runs_of_spaces_are_tokens(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, **{"tokenizer.ggml.add_space_prefix": False})
    for text, tokens in {
        "ab ab": ["ab", "▁ab"],
        "a  b": ["a", "  ", "b"],
        "a   b\n\n\nab": ["a", "   ", "b", "\n\n", "\n", "ab"],
        "a\tbc": ["a", "\t", "bc"],
        "<|user|> a": ["<|user|>", "▁a"],
        "aé": ["a", "<0xC3>", "<0xA9>"],
    }.items():
        found = tokenizer.encode(text)
        assert found.tokens == tokens
        assert tokenizer.decode(found.ids, skip_special_tokens=False) == text


def test_phi3s_special_tokens_take_the_space_after_them(tmp_path: Path) -> None:
    def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
        return [tokenizer.id_to_token(token_id) for token_id in tokenizer.encode(text).ids]

    phi3, other = sentencepiece(tmp_path, arch="phi3"), sentencepiece(tmp_path)
    text, end = "<|user|> ab</s> ab<s> ab", ["<s>", "▁", "▁ab"]
    assert tokens(phi3, text) == ["<|user|>", "▁ab", "</s>", "▁ab", *end]
    assert tokens(other, text) == ["<|user|>", "▁", "▁ab", "</s>", "▁", "▁ab", *end]


def test_named_templates_are_kept(tmp_path: Path) -> None:
    keys = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.rag": "{{ documents }}",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["rag", "tool_use"],
    }
    converted(tmp_path, keys)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert [each["name"] for each in config["chat_template"]] == ["default", "rag", "tool_use"]
    source = find_chat_template(tmp_path)
    assert source is not None
    assert "plain" in source
    assert "with tools" in source


def test_an_empty_token_gets_a_name(tmp_path: Path) -> None:
    texts = tiny_gguf.byte_vocabulary(320)
    texts[300] = ""
    tokenizer = converted(tmp_path, {"tokenizer.ggml.tokens": texts})
    assert tokenizer.id_to_token(300) == "[EMPTY_300]"


def test_a_token_that_ends_a_turn_is_a_control_token_whatever_the_file_says(tmp_path: Path) -> None:
    texts = tiny_gguf.byte_vocabulary(320)
    texts[300], texts[301] = "<end_of_turn>", "<|end|>"
    kinds = [int(TokenType.NORMAL)] * 320
    kinds[301] = int(TokenType.USER_DEFINED)
    keys = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    tokenizer = converted(tmp_path, keys)
    assert tokenizer.encode("a<end_of_turn>").ids[-1:] == [300]
    assert tokenizer.decode([300, 301]) == ""
    with GGUFFile(tmp_path / "m.gguf") as file:
        assert {300, 301} <= set(gguf_tokenizer.read_tokens(file, 320).stops)


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), {"<|return|>", "<|call|>", "<|endoftext|>"}),
        (("<|return|>", "<|end|>", "<|x|>"), {"<|im_end|>", "<|end|>"}),
    ],
)
def test_a_message_of_gpt_oss_may_end_before_its_turn(
    tmp_path: Path, control: tuple[str, ...], ends: set[str]
) -> None:
    keys = tiny_gguf.metadata(tiny_gguf.TinyLlama())
    for index, text in enumerate(control, 300):
        keys["tokenizer.ggml.tokens"][index] = text
        keys["tokenizer.ggml.token_type"][index] = int(TokenType.CONTROL)
    keys["tokenizer.ggml.eos_token_id"] = 300 if "<|call|>" in control else 2
    with GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", {}, keys)) as file:
        tokens = gguf_tokenizer.read_tokens(file, 320)
    assert {tokens.texts[token_id] for token_id in tokens.stops} == ends
