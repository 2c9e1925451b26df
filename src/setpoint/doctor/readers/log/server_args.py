"""The options of ``server_args=ServerArgs(model_path='…', tp_size=1, …)``: Python's repr of the
object, or of a namespace or dict in other versions and wrappers; possibly cut off."""

from __future__ import annotations

import ast
import re
from typing import Any

_NAME = re.compile(r"""\s*(?:'(\w+)'|"(\w+)"|(\w+))\s*[=:]\s*""")
_OPEN, _CLOSE = "([{<", ")]}>"
_MARK = re.compile(r"""['"()\[\]{}<>,]""")
_QUOTES = {quote: re.compile(rf"""\\.|{quote}""", re.DOTALL) for quote in "'\""}
"""What may end a string that begins with this quote: a quote, unless it is escaped."""
MAX_OPTIONS = 4000
"""SGLang has some 550."""
_BEGINS = re.compile(r"server_args=\s*(?:[\w.]+\s*\(|\{)|\bServerArgs\(|Namespace\((?=model)")
_SECRET = re.compile(
    r"""((?<![a-z])(?:admin_)?api_key['"]?\s*[=:]\s*)(?:'[^']*'?|"[^"]*"?|(?!None\b)[^\s,)'"]+)"""
)
_NUMBER = re.compile(r"-?(?:\d{1,18}|\d{1,18}\.\d{0,18}|\d{1,18}(?:\.\d{1,18})?[eE]-?\d{1,3})")
_ENUM = re.compile(r"<\w+\.\w+: (.+)>")


def begin_of_options(text: str) -> int | None:
    """The place in a line where its options begin, after their opening bracket; None if it has
    none."""
    if "rgs" not in text and "Namespace" not in text:
        return None
    found = _BEGINS.search(text)
    return None if found is None else found.end()


def without_secrets(text: str) -> str:
    """The text with its API keys masked. Some versions of SGLang print them, and a report is passed
    on more freely than a log."""
    return _SECRET.sub(r"\1'********'", text) if "_key" in text else text


def options_of(text: str) -> dict[str, tuple[Any, int]]:
    """The options by field name: their values, and where they begin in the text. text: what follows
    the opening bracket. An option that is cut off is left out."""
    options: dict[str, tuple[Any, int]] = {}
    position = 0
    while len(options) < MAX_OPTIONS:
        name = _NAME.match(text, position)
        if name is None:
            break
        end, whole = _end_of_value(text, name.end())
        if not whole:
            break
        value = value_of(text[name.end() : end].strip())
        options[name[1] or name[2] or name[3]] = value, name.start()
        if end >= len(text) or text[end] != ",":
            break
        position = end + 1
    return options


class Brackets:
    """Takes the pieces of a text, and finds the bracket that closes one opened before them."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    def closes(self, piece: str) -> bool:
        """Whether that bracket is in this piece."""
        position = 0
        while True:
            mark = (_QUOTES[self._quote] if self._quote else _MARK).search(piece, position)
            if mark is None:
                return False
            position, character = mark.end(), mark.group()
            if self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "'\"":
                self._quote = character
            elif character in _OPEN:
                self._depth += 1
            elif character in _CLOSE:
                self._depth -= 1
                if self._depth < 0:
                    return True


def _end_of_value(text: str, start: int) -> tuple[int, bool]:
    """The place where the value ends (at a comma or the closing bracket of the whole), and whether
    it ends before the text does."""
    depth, position = 0, start
    while (mark := _MARK.search(text, position)) is not None:
        position, character = mark.end(), mark.group()
        if character in "'\"":
            while True:
                end = _QUOTES[character].search(text, position)
                if end is None:
                    return len(text), False
                position = end.end()
                if end.group() == character:
                    break
        elif character in _OPEN:
            depth += 1
        elif depth == 0:
            return mark.start(), True
        elif character in _CLOSE:
            depth -= 1
    return len(text), False


def value_of(text: str) -> Any:
    """The value of a repr: a Python literal, an enumeration's value, JSON's words, or the text."""
    enum = _ENUM.fullmatch(text)
    if enum:
        text = enum[1]
    words = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text or "e" in text.lower() else int(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
