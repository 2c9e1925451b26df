"""The byte-level BPE tokenizer of a GGUF file: its merges, and the named pre-tokenizer that splits
text into words before merging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import quoted


def pre_tokenizer_of(file: GGUFFile) -> PreTokenizer:
    """The pre-tokenizer that the file names. Raises CheckpointError for an unknown one."""
    pre = file.get("tokenizer.ggml.pre", str) or "default"
    found = PRE_TOKENIZERS.get(pre)
    if found is None:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {quoted(pre)} is not supported"
            f" ({len(PRE_TOKENIZERS)} others are; docs/supported-models.md lists them)."
        )
    return found


def byte_level(file: GGUFFile, texts: Sequence[str], log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a file. texts: its tokens, in the order of their ids. log: receives a line
    if the pre-tokenizer had to be guessed. Raises CheckpointError for an unknown pre-tokenizer."""
    if file.get("tokenizer.ggml.pre", str) is None:
        log(
            f"{file.path.name} does not name its pre-tokenizer; 'default' is used, as llama.cpp"
            " does."
        )
    how = pre_tokenizer_of(file)
    merges = []
    for merge in file.require("tokenizer.ggml.merges", list):
        left, _, right = str(merge).partition(" ")
        merges.append((left, right))
    vocabulary = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=how.whole_words)
    )
    if how.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting(how)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def splitting(how: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Splits by each pattern in turn, then maps bytes to the byte-level alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in how.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
