"""Writes a GGUF file's vocabulary as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Two tokenizer families are supported: "gpt2" (byte-level BPE with merges and a named pre-tokenizer)
and "llama" (SentencePiece BPE with scores). Any other family, and any pre-tokenizer that
``gguf_pre_tokenizers`` does not have, is refused by name, because nobody would notice that a
tokenizer is only nearly right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from setpoint.checkpoint.gguf.byte_level import byte_level, pre_tokenizer_of
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import quoted

SPACE = "▁"
TEMPLATE = "tokenizer.chat_template"
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""The added tokens of Phi-3 that do not take the white space after them. Files do not say it."""
MAX_TOKEN_CHARS = 1024
"""Characters of a token that SentencePiece may merge; trainings stop at 16 unless they are told
otherwise."""
MAX_MERGED_CHARS = 1 << 24
"""Characters of all merges of a SentencePiece vocabulary. Gemma 3's 514,906 merges have a third of
them; a file of one megabyte could ask for gigabytes."""

TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endofturn|>",
)
"""Tokens that end a turn in some chat format. Models list them in addition to EOS in their
generation configs. Some files do not mark them as control tokens; they are, as for llama.cpp."""
HARMONY_ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""The same of gpt-oss, in whose format <|end|> ends a message, after which the turn may go on."""


@dataclass(slots=True, frozen=True)
class GgufVocabulary:
    """A vocabulary, and the ids of the tokens with a special role. Lists are indexed by token
    id."""

    family: str
    texts: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None
    stops: tuple[int, ...]
    """EOS first, then every other token that ends a turn."""

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.texts[token_id]


def read_tokens(file: GGUFFile, vocab_size: int) -> GgufVocabulary:
    """The file's vocabulary. Raises CheckpointError unless texts are distinct, there are no more of
    them than the embedding's ``vocab_size`` rows, and special ids are in range."""
    family = file.require("tokenizer.ggml.model", str)
    if family not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.path}: tokenizer {quoted(family)} is not supported (supported: gpt2, llama)."
        )
    texts = [
        text or f"[EMPTY_{index}]"
        for index, text in enumerate(_strings(file, "tokenizer.ggml.tokens"))
    ]
    kinds = file.get("tokenizer.ggml.token_type", list) or [int(TokenType.NORMAL)] * len(texts)
    if not all(type(kind) is int for kind in kinds):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type must be a list of whole numbers."
        )
    if len(set(texts)) != len(texts) or len(kinds) != len(texts) or len(texts) > vocab_size:
        raise CheckpointError(
            f"{file.path}: the vocabulary is inconsistent: {len(texts)} tokens ({len(set(texts))}"
            f" distinct, {len(kinds)} typed) for {vocab_size} embeddings."
        )

    def role(name: str, default: int | None) -> int | None:
        token_id = file.get(f"tokenizer.ggml.{name}_token_id", int)
        token_id = default if token_id is None else token_id
        if token_id is not None and not 0 <= token_id < len(texts):
            raise CheckpointError(
                f"{file.path}: {name} token id {token_id} is outside the vocabulary of"
                f" {len(texts)}."
            )
        return token_id

    unk, bos, eos = (
        (0, 1, 2) if family == "llama" else (None, None, None)
    )  # SentencePiece's fixed ids
    eos = role("eos", eos)
    ends = [eos, role("eot", None), role("eom", None)]
    control = {text for text, kind in zip(texts, kinds, strict=True) if kind == TokenType.CONTROL}
    turn_ends = HARMONY_ENDS if control.issuperset(HARMONY_ENDS) else TURN_ENDS
    ends += [index for index, text in enumerate(texts) if text in turn_ends]
    stops = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return GgufVocabulary(
        family,
        texts,
        [
            int(TokenType.CONTROL) if text in turn_ends else kind
            for text, kind in zip(texts, kinds, strict=True)
        ],
        role("bos", bos),
        eos,
        role("padding", None),
        role("unknown", unk),
        stops,
    )


def write(
    file: GGUFFile,
    tokens: GgufVocabulary,
    folder: Path,
    *,
    context_len: int,
    log: Callable[[str], None],
) -> None:
    """Write the tokenizer's files into ``folder``."""
    try:
        tokenizer = (
            _sentencepiece(file, tokens, log)
            if tokens.family == "llama"
            else byte_level(file, tokens.texts, log)
        )
    except CheckpointError:
        raise
    except Exception as error:  # the library raises Exception for a merge of unknown tokens
        raise CheckpointError(
            f"{file.path}: no tokenizer can be made from the vocabulary: {error}"
        ) from None
    tokenizer.add_tokens(_added(file, tokens))
    _add_borders(file, tokens, tokenizer)
    (folder / "tokenizer.json").write_text(
        tokenizer.to_str(pretty=True), encoding="utf-8"
    )  # the library's save raises no OSError
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens.text(tokens.bos),
        "eos_token": tokens.text(tokens.eos),
        "pad_token": tokens.text(tokens.pad),
        "unk_token": tokens.text(tokens.unk),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
    }
    templates = _templates(file)
    if len(templates) > 1:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    elif "default" in templates:
        (folder / "chat_template.jinja").write_text(templates["default"], encoding="utf-8")
    if "default" not in templates:
        log(f"{file.path.name} has no chat template: chat requests will need --chat-template.")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    )


def _added(file: GGUFFile, tokens: GgufVocabulary) -> list[AddedToken]:
    """The tokens that are found in a text before it is split, and never split themselves."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    is_phi3 = tokens.family == "llama" and file.get("general.architecture", str) == "phi3"
    return [
        AddedToken(
            text,
            special=kind in special,
            normalized=False,
            rstrip=is_phi3 and text not in PHI3_KEEPS_SPACE,
        )
        for text, kind in zip(tokens.texts, tokens.kinds, strict=True)
        if kind in (*special, TokenType.USER_DEFINED)
    ]


def _templates(file: GGUFFile) -> dict[str, str]:
    """Name -> chat template; the unnamed one is "default"."""
    found = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": file.require(key, str)
        for key in file.metadata
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
    }
    return {name: found[name] for name in sorted(found, key=lambda name: (name != "default", name))}


def _strings(file: GGUFFile, key: str) -> list[str]:
    found = file.require(key, list)
    if not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"{file.path}: {key} must be a list of texts.")
    return found


def _sentencepiece(file: GGUFFile, tokens: GgufVocabulary, log: Callable[[str], None]) -> Tokenizer:
    """A BPE tokenizer with a SentencePiece vocabulary.

    SentencePiece merges the two neighbours that make the token with the highest score. In BPE,
    every split of a token into two tokens is a merge, and the scores give the order of the merges.
    Characters outside the vocabulary become bytes.
    """
    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if file.metadata.get(f"tokenizer.ggml.{key}"):
            raise CheckpointError(
                f"{file.path}: SentencePiece normalisation (tokenizer.ggml.{key}) is not supported."
            )
    scores = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens.texts):
        raise CheckpointError(f"{file.path}: {len(scores)} scores for {len(tokens.texts)} tokens.")
    if len(set(scores)) == 1:
        log(
            f"{file.path.name} has the same score for all tokens, so the order of merges is guessed"
            " from their ids, as in Llama 2."
        )
        # Llama 2's runs of spaces, like Mistral's, are merged last.
        scores = [
            -float(index) if text.strip(SPACE) else -math.inf
            for index, text in enumerate(tokens.texts)
        ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(tokens.texts)},
            merges=_merges(file, tokens, scores),
            unk_token=tokens.text(tokens.unk),
            fuse_unk=True,
            byte_fallback=int(TokenType.BYTE) in tokens.kinds,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(file: GGUFFile, tokens: GgufVocabulary, scores: list[Any]) -> list[tuple[str, str]]:
    """Every split of a token into two, in the order of the tokens' scores, then of ids."""
    texts = tokens.texts
    mergeable = {
        text: index
        for index, (text, kind) in enumerate(zip(texts, tokens.kinds, strict=True))
        if kind == TokenType.NORMAL
    }
    merges: list[tuple[float, int, int, int]] = []
    num_chars = 0
    for text, index in mergeable.items():
        if len(text) > MAX_TOKEN_CHARS:
            raise CheckpointError(
                f"{file.path}: token {index} has {len(text)} characters, and at most"
                f" {MAX_TOKEN_CHARS} are read; the file is damaged."
            )
        before = len(merges)
        for cut in range(1, len(text)):
            left = mergeable.get(text[:cut])
            right = None if left is None else mergeable.get(text[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], index, left, right))
        num_chars += (len(merges) - before) * len(text)
        if num_chars > MAX_MERGED_CHARS:
            raise CheckpointError(
                f"{file.path}: the merges of its tokens have more than {MAX_MERGED_CHARS}"
                " characters; the file is damaged."
            )
    return [(texts[left], texts[right]) for _, _, left, right in sorted(merges)]


def _add_borders(file: GGUFFile, tokens: GgufVocabulary, tokenizer: Tokenizer) -> None:
    """Let the tokenizer add BOS before and EOS after every text if the file asks for it. If it says
    nothing about BOS, its family decides."""
    bos = file.get("tokenizer.ggml.add_bos_token", bool)
    if bos is None:
        bos = tokens.family == "llama" or pre_tokenizer_of(file).adds_bos
    eos = file.get("tokenizer.ggml.add_eos_token", bool) is True
    before = [(tokens.texts[tokens.bos], tokens.bos)] if bos and tokens.bos is not None else []
    after = [(tokens.texts[tokens.eos], tokens.eos)] if eos and tokens.eos is not None else []
    if before or after:
        template = [text for text, _ in before] + ["$A"] + [text for text, _ in after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=sorted({*before, *after})
        )
