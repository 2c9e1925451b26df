"""The byte-level BPE tokenizer of a GGUF file: its merges, and the named pre-tokenizer that splits
text into words before merging."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from setpoint.checkpoint.gguf_file import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint.core.excerpt import excerpt

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def byte_level(file: GGUFFile, texts: Sequence[str], log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a file. texts: its tokens, in the order of their ids. log: receives a line
    if the pre-tokenizer had to be guessed. Raises CheckpointError for an unknown pre-tokenizer."""
    pre = file.get("tokenizer.ggml.pre", str)
    if pre is None:
        log(
            f"{file.path.name} does not name its pre-tokenizer; 'default' is used, as llama.cpp"
            " does."
        )
        pre = "default"
    split = PRE_TOKENIZERS.get(pre)
    if split is None:
        raise CheckpointError(
            f"{file.path}: pre-tokenizer {excerpt(pre)!r} is not supported (supported:"
            f" {', '.join(PRE_TOKENIZERS)})."
        )
    merges = []
    for merge in file.require("tokenizer.ggml.merges", list):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    vocabulary = {text: index for index, text in enumerate(texts)}
    # Llama 3 takes a word that is a token as it is and tries no merge.
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3_NAMES)
    )
    if pre in ("qwen2", "olmo"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _patterns(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer that splits by each pattern in turn, then maps bytes to the byte-level
    alphabet."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    ),
    **dict.fromkeys(LLAMA3_NAMES, lambda: _patterns(LLAMA3_PATTERN)),
    "qwen2": lambda: _patterns(QWEN2_PATTERN),
    "default": lambda: _patterns(
        r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]"
    ),
}
"""GGUF's tokenizer.ggml.pre -> factory of the pre-tokenizer that splits text into words."""
