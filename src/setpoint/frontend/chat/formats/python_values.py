"""The arguments of a call in Python's syntax: where they end in a stream, and their JSON."""

from __future__ import annotations

import ast
import re
import warnings
from threading import Lock
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.scanning import is_cut

_SIGNS = re.compile(r"[\"'()\[\]{}]")
_IN_STRING = {'"': re.compile(r'[\\"]'), "'": re.compile(r"[\\']")}
_PARSING = Lock()
MAX_CHARS = 1 << 16
"""Longest text that is read as Python: that takes much longer than JSON, and holds the
interpreter's lock."""
_NAMES = {"true": True, "false": False, "null": None, "none": None}
"""Values that models write as in other languages."""


class PythonScan:
    """Finds the parenthesis that closes a call, from after the one that opens it."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._quote = ""
        """What ends the present string; empty outside of strings."""

    def feed(self, text: str, at: int, *, ended: bool) -> int:
        """The index after what has been read; in the end after the closing parenthesis."""
        while at < len(text) and not self.is_done:
            stop = self._string(text, at) if self._quote else self._code(text, at, ended=ended)
            if stop == at:
                break
            at = stop
        return at

    def _string(self, text: str, at: int) -> int:
        while at < len(text):
            if text[at] == "\\":
                if at + 1 == len(text):
                    return at
                at += 2
            elif text.startswith(self._quote, at):
                at += len(self._quote)
                self._quote = ""
                return at
            elif is_cut(text, at, self._quote):
                return at
            else:
                found = _IN_STRING[self._quote[0]].search(text, at + 1)
                at = len(text) if found is None else found.start()
        return at

    def _code(self, text: str, at: int, *, ended: bool) -> int:
        found = _SIGNS.search(text, at)
        if found is None:
            return len(text)
        at, sign = found.start(), found.group()
        if sign in "\"'":
            return self._open_string(text, at, sign, ended=ended)
        self._depth += 1 if sign in "([{" else -1
        self.is_done = self._depth < 0
        return at + 1

    def _open_string(self, text: str, at: int, sign: str, *, ended: bool) -> int:
        if text.startswith(sign * 3, at):
            self._quote = sign * 3
            return at + 3
        if len(text) - at < 3 and text[at:] == sign * (len(text) - at) and not ended:
            return at  # one quote, an empty string, or three quotes
        if text.startswith(sign * 2, at):
            return at + 2
        self._quote = sign
        return at + 1


def keyword_arguments(text: str, tool: Tool | None) -> str:
    """The JSON object of the text between the parentheses of a call; empty if that is no list of
    plain values, or is longer than MAX_CHARS. Arguments without a name are those of the tool's
    schema, in its order."""
    try:
        call = _expression(f"f({text})")
        if not isinstance(call, ast.Call):
            return ""
        names = _property_names(tool)
        found = {names[index]: _value(node) for index, node in enumerate(call.args)}
        for keyword in call.keywords:
            if keyword.arg is None:
                return ""
            found[keyword.arg] = _value(keyword.value)
        return json_text(found)
    except (SyntaxError, ValueError, TypeError, IndexError, MemoryError, RecursionError):
        return ""


def python_value(text: str) -> Any:
    """The value of a Python literal. Raises ValueError for a text that is not one, or is longer
    than MAX_CHARS."""
    try:
        return _value(_expression(text))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _expression(text: str) -> ast.expr:
    if len(text) > MAX_CHARS:
        raise ValueError("it is too long")
    # Python's warnings are about the model's text. Their filters belong to the process, and texts
    # are parsed in more than one thread.
    with _PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _property_names(tool: Tool | None) -> list[str]:
    properties = (tool.parameters or {}).get("properties") if tool is not None else None
    return list(properties) if isinstance(properties, dict) else []


def _value(node: ast.expr) -> Any:
    """The value of a node. Raises ValueError for a node that is not a literal."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise ValueError("not a plain dict")
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)
