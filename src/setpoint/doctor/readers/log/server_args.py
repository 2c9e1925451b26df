"""The options of ``server_args=ServerArgs(model_path='…', tp_size=1, …)``: Python's repr of the
object, or of a namespace or dict in other versions and wrappers; possibly cut off."""

from __future__ import annotations

import ast
import re
from typing import Any

_NAME = re.compile(r"""\s*(?:'(\w+)'|"(\w+)"|(\w+))\s*[=:]\s*""")
_OPEN, _CLOSE = "([{<", ")]}>"
BEGINS = re.compile(r"server_args=\s*(?:[\w.]+\s*\(|\{)|\bServerArgs\(|Namespace\((?=model)")
_SECRET = re.compile(
    r"""((?<![a-z])(?:admin_)?api_key['"]?\s*[=:]\s*)(?:'[^']*'?|"[^"]*"?|(?!None\b)[^\s,)'"]+)"""
)
_ENUM = re.compile(r"<\w+\.\w+: (.+)>")


def without_secrets(text: str) -> str:
    """Versions of SGLang print their API keys; a report is passed on more freely than a log."""
    return _SECRET.sub(r"\1'********'", text) if "_key" in text else text


def options_of(text: str) -> dict[str, Any]:
    """Options by field name. text: what follows the opening bracket. What is cut off is left
    out."""
    options: dict[str, Any] = {}
    position = 0
    while True:
        name = _NAME.match(text, position)
        if name is None:
            return options
        end, whole = _end_of_value(text, name.end())
        if not whole:
            return options
        options[name[1] or name[2] or name[3]] = value_of(text[name.end() : end].strip())
        if end >= len(text) or text[end] != ",":
            return options
        position = end + 1


def is_whole(text: str) -> bool:
    """Whether the bracket that was opened before the text is closed in it."""
    position = 0
    while True:
        end, whole = _end_of_value(text, position)
        if not whole:
            return False
        if text[end] != ",":
            return True
        position = end + 1


def _end_of_value(text: str, start: int) -> tuple[int, bool]:
    """Where the value ends (at a comma or the closing bracket of the whole), and whether it does
    before the text does."""
    depth, quote, position = 0, "", start
    while position < len(text):
        character = text[position]
        if quote:
            if character == "\\":
                position += 1
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            if depth == 0:
                return position, True
            depth -= 1
        elif character == "," and depth == 0:
            return position, True
        position += 1
    return position, False


def value_of(text: str) -> Any:
    """The value of a repr: a Python literal, an enumeration's value, JSON's words, or the text."""
    enum = _ENUM.fullmatch(text)
    if enum:
        text = enum[1]
    words = {"true": True, "false": False, "null": None}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
