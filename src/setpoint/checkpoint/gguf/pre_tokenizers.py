"""The named pre-tokenizers of byte-level BPE: how text is split into words before merging.

Only data. The expressions are those of the models' own tokenizers (tokenizer.json of each family);
where a name stands for several models, those that all have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, *, letters: str = r"\p{L}+", contractions: bool = True) -> str:
    """The expression that began with GPT-4's: contractions, letters after at most one other sign,
    digits, signs with the line breaks after them, white space."""
    begin = f"{CONTRACTIONS}|" if contractions else ""
    return (
        rf"{begin}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BREAKS}"
    )


def _cased(digits: str, *, contractions: bool) -> str:
    """The expression that began with GPT-4o's: a word ends where a capital follows a small
    letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    begin, end = r"[^\r\n\p{L}\p{N}]?", f"{CONTRACTIONS}?" if contractions else ""
    return (
        rf"{begin}{upper}*{lower}+{end}|{begin}{upper}+{lower}*{end}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BREAKS}"
    )


CL100K = _words(r"\p{N}{1,3}")
QWEN2 = _words(DIGIT)
O200K = _cased(r"\p{N}{1,3}", contractions=True)
THREE_DIGITS = "[0-9][0-9][0-9]"
CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CJK_AND_KOREAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
DEEPSEEK_WORD = rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
DEEPSEEK = rf"{DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BREAKS}"
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
HAN = r"[\p{Han}]+"
KIMI = rf"{HAN}|" + _cased(r"\p{N}{1,3}", contractions=True).replace(
    r"\p{M}]", r"\p{M}&&[^\p{Han}]]"
).replace(r"[\r\n/]*", r"[\r\n]*")
DEEPSEEK_LLM_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of the scripts that have capitals."""


@dataclass(slots=True, frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    """Each splits what the earlier ones have left; a match is a word, and so is what lies
    between two."""
    composes: bool = False
    """Whether the text is put into Unicode's composed form first (NFC)."""
    whole_words: bool = False
    """Whether a word that is a token is taken as it is, without merging."""
    adds_bos: bool = False
    """Whether BOS comes first if the file does not say it."""


def _named(how: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, how)


_gpt2, _digits = PreTokenizer((GPT2,)), PreTokenizer((DIGIT, GPT2))
_cl100k, _qwen2 = PreTokenizer((CL100K,)), PreTokenizer((QWEN2,))
_deepseek = PreTokenizer((r"\p{N}{1,3}", CJK, DEEPSEEK))
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", THREE_DIGITS)),
    **_named(_gpt2, "gpt-2", "phi-2", "jais", "trillion", "granite-docling", "gigachat"),
    **_named(_gpt2, "a.x-4.0", "mellum", "exaone4"),
    **_named(replace(_gpt2, composes=True), "mpt", "olmo"),
    **_named(_digits, "smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"),
    **_named(_digits, "mellum2"),
    "command-r": replace(_digits, composes=True),
    **_named(
        replace(_cl100k, whole_words=True, adds_bos=True),
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    **_named(_cl100k, "dbrx", "smaug-bpe", "chatglm-bpe"),
    **_named(replace(_cl100k, whole_words=True), "glm4", "glm5"),
    "jais-2": PreTokenizer(
        (
            CL100K.replace(
                r"\s+(?!\S)|\s+",
                "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
                + r"|\s{1,2}(?!\S)|\s{1}",
            ),
        )
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    **_named(replace(_qwen2, composes=True), "qwen2", "megrez", "stablelm2"),
    **_named(_qwen2, "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"),
    "qwen35": PreTokenizer(
        (
            _words(DIGIT, letters=r"[\p{L}\p{M}]+").replace(
                r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
            ),
        ),
        composes=True,
    ),
    "ufakzeka": PreTokenizer((_words(DIGIT, contractions=False),)),
    "seed-coder": PreTokenizer((QWEN2.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    **_named(
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        *("bailingmoe", "bailingmoe2", "llada-moe"),
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            _words(DIGIT, letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+")
            .replace(r"\p{N}]+[\r\n]*", r"\p{N}]+[\r\n/]?")
            .replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
        )
    ),
    "tekken": PreTokenizer((_cased(DIGIT, contractions=False),), whole_words=True, adds_bos=True),
    **_named(PreTokenizer((O200K,)), "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    **_named(
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", O200K)),
        *("tiny_aya", "cohere2moe"),
    ),
    "kimi-k2": PreTokenizer((KIMI,)),
    "youtu": PreTokenizer(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
            r"\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + CJK,
            _cased(DIGIT, contractions=True),
        ),
        whole_words=True,
    ),
    **_named(_deepseek, "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            CJK,
            rf"{DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            DIGIT,
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{DEEPSEEK_LLM_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            CJK_AND_KOREAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_KOREAN, DIGIT)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS)),
    **_named(PreTokenizer((BLOOM,)), "poro-chat", "bloom", "gpt3-finnish"),
    "viking": PreTokenizer((BLOOM, DIGIT)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
}
"""GGUF's tokenizer.ggml.pre -> the pre-tokenizer. Those that llama.cpp (11434) knows, except for
encoders (jina-*, roberta-bpe, modern-bert, mmbert, whitespace, granite-embed-*) and for afmoe,
chameleon, gemma4 and sarvam-moe, whose own tokenizers are not known here."""
