"""Regular expressions of a schema: which a grammar has, which texts they match, and expressions
for the opposite of a list of texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from setpoint.core.errors import RequestError
from setpoint.core.excerpt import excerpt

_NOT_REGULAR = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\((?:\?P?<\w+>)?[^)]*\)(?:.*(?<!\\)(?:\\\\)*)\\[1-9]|\\k<|\\[bB])",
    re.DOTALL,
)
"""Look-around, references to groups and edges of words: no grammar library has them."""

_IGNORES_CASE = re.compile(r"(?<!\\)(?:\\\\)*\(\?[a-zA-Z]*i")
_CLASS = re.compile(r"\[|\\[pP]")
MAX_CLASSES = 64
"""Most classes of an expression that ignores case: llguidance takes up to 4 ms for each."""

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_REPEATED = re.compile(r"(?<!\\)(?:\\\\)*[*+{]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
MAX_REPEATED = 3
MAX_TEXT = 256
"""Python's search takes exponential time for some expressions. One with at most this many
repetitions, none of them of a group, in a text of at most this length is always quick."""


def ends_in_escape(pattern: str) -> bool:
    """Whether an expression ends with a backslash that nothing follows."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def for_grammars(pattern: str) -> str:
    """The expression as the grammar libraries get it. Raises RequestError (400) for what they would
    drop without a word, and for what takes them too long."""
    if ends_in_escape(pattern):
        raise RequestError(
            f"the expression {excerpt(pattern, 64)} ends with a backslash that nothing follows; a"
            r" backslash in the text is \\"
        )
    if _IGNORES_CASE.search(pattern) and len(_CLASS.findall(pattern)) > MAX_CLASSES:
        raise RequestError(
            f"the expression {excerpt(pattern, 64)} has more than {MAX_CLASSES} classes of"
            " characters ([…]), and the flag i"
        )
    return pattern


def is_regular(pattern: str) -> bool:
    """Whether a grammar library can hold a text to the expression."""
    return _NOT_REGULAR.search(pattern) is None


def is_found(pattern: str, text: str) -> bool | None:
    """Whether the expression matches somewhere in the text; None if that is not known."""
    is_quick = (
        len(text) <= MAX_TEXT
        and len(_REPEATED.findall(pattern)) <= MAX_REPEATED
        and not _REPEATED_GROUP.search(pattern)
        and not _IGNORES_CASE.search(pattern)  # by Unicode's rules, which re.ASCII changes
    )
    if not is_quick:
        return None
    # In JSON Schema, $ is only the end of the text, and \d are the ten digits.
    try:
        ended = re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1\\Z", pattern)
        return re.search(ended, text, re.ASCII) is not None
    except (re.error, OverflowError, RecursionError):
        return None


def literal(text: str) -> str:
    """An expression for this text, without anchors."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def of_length(least: int, most: int | None) -> str:
    """An expression for all texts of such a length."""
    return rf"^[\s\S]{{{least},{'' if most is None else most}}}$"


def one_of(patterns: Iterable[str]) -> str:
    """An expression that is found where one of these is."""
    unique = list(dict.fromkeys(patterns))
    return unique[0] if len(unique) == 1 else "|".join(f"(?:{each})" for each in unique)


def none_of(texts: Collection[str]) -> str:
    """An expression for every text but these."""
    return f"^(?:{_other_than(sorted(set(texts)), 0)})$"


def _other_than(texts: list[str], at: int) -> str:
    """An expression for what may follow the first ``at`` characters, which all texts share."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > at:
            branches.setdefault(text[at], []).append(text)
    is_text = any(len(text) == at for text in texts)
    if not branches:
        return r"[\s\S]+" if is_text else r"[\s\S]*"
    others = "".join(_in_set(first) for first in branches)
    parts = [rf"[^{others}][\s\S]*"]
    parts += [
        f"{literal(first)}(?:{_other_than(some, at + 1)})" for first, some in branches.items()
    ]
    return "|".join(parts if is_text else ["", *parts])


def _in_set(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[" else character
