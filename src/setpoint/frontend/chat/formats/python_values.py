"""The arguments of a call in Python's syntax: where they end in a stream, and their JSON."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from threading import Lock
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_scan import json_text
from setpoint.frontend.chat.formats.scanning import is_cut

_SIGNS = re.compile(r"[\"'()\[\]{}]")
_IN_STRING = {'"': re.compile(r'[\\"]'), "'": re.compile(r"[\\']")}
_QUOTES = "\"'"
_MAX_GAP = 256
"""Most characters of whitespace between a string and what follows it."""
_NAMED = re.compile(r"\w[ \t]*+=[ \t]*+\Z")
_ZEROS = re.compile(r"(?<![\w.])0++(?=[1-9][0-9_]*+(?![\w.]))")
_MARK = "word_"
_KEYWORD = re.compile(rf"(?<![\w.])(?:{'|'.join(keyword.kwlist)})(?=\s*+=(?!=))")
"""A word of Python as the name of an argument, which Python reads with ``_MARK`` before it."""
_PARSING = Lock()
MAX_CHARS = 1 << 16
"""Longest text that is read as Python: that takes much longer than JSON, and holds the
interpreter's lock."""
_NAMES = {"true": True, "false": False, "null": None, "none": None}
"""Values that models write as in other languages."""


class PythonScan:
    """Finds the parenthesis that closes a call, from after the one that opens it, and makes Python
    of the text before: a string may contain line ends, and quotes behind which nothing comes that
    may follow a string; numbers may begin with zeros, and arguments may have Python's own words
    for names."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """is_strict: the next quote ends a string, whatever follows, as in Python."""
        self.is_done = False
        self.is_broken = False
        """Whether a string has no end of its own, so that what follows may be in it or not, or
        another bracket closes the call."""
        self.has_inner_quotes = False
        """Whether a string has quotes of its own kind in it, so that Python reads another text."""
        self._is_strict = is_strict
        self._depth = 0
        self._before = ""
        """The last characters of the present string."""
        self._quote = ""
        """What ends the present string; empty outside of strings."""
        self._code_parts: list[str] = []
        """The text since the last string."""
        self._python: list[str] = []

    def python(self) -> str:
        """The text between the parentheses, as Python."""
        self._end_code()
        return "".join(self._python)

    def feed(self, text: str, at: int, *, ended: bool) -> int:
        """The index after what has been read; in the end after the closing parenthesis."""
        while at < len(text) and not self.is_done:
            read = self._string if self._quote else self._code
            stop = read(text, at, ended=ended)
            if stop == at:
                break
            at = stop
        return at

    def _string(self, text: str, at: int, *, ended: bool) -> int:
        if text[at] == "\\":
            if at + 1 == len(text):
                return at
            self._python.append(text[at : at + 2])
            return at + 2
        if not text.startswith(self._quote, at):
            if is_cut(text, at, self._quote):
                return at
            found = _IN_STRING[self._quote[0]].search(text, at + 1)
            stop = len(text) if found is None else found.start()
            self._python.append(self._plain(text[at:stop]))
            self._before = (self._before + text[at:stop])[-_MAX_GAP:]
            return stop
        stop = at + len(self._quote)
        is_certain = self._is_strict or len(self._quote) > 1
        closes = is_certain or self._closes(text, stop, ended=ended)
        if closes is None:
            return at
        self.has_inner_quotes |= not closes
        self._python.append(self._quote if closes else f"\\{self._quote}")
        # A quote behind "name=" opens a string: the one before has lost its own quote.
        self.is_broken |= not closes and _NAMED.search(self._before) is not None
        self._quote = "" if closes else self._quote
        return stop

    def _plain(self, text: str) -> str:
        if len(self._quote) == 1:
            text = text.replace("\n", "\\n").replace("\r", "\\r")
        return text.replace("\0", "\\0")

    def _closes(self, text: str, at: int, *, ended: bool) -> bool | None:
        """Whether the quote before ``at`` closes its string: something follows that may follow a
        string. None if the text is too short to tell."""
        at = _skip_space(text, at)
        if at == len(text):
            return True if ended else None
        if text[at] in _QUOTES:
            return text[at - 1].isspace()  # two strings in a row are one
        if text[at] != ")" or self._depth:
            return text[at] in ",:)]}"
        at = _skip_space(text, at + 1)
        if at == len(text):
            return True if ended else None
        return text[at] in ",]<"

    def _code(self, text: str, at: int, *, ended: bool) -> int:
        found = _SIGNS.search(text, at)
        stop = len(text) if found is None else found.start()
        self._code_parts.append(text[at:stop])
        if found is None:
            return stop
        at, sign = stop, found.group()
        if sign in _QUOTES:
            return self._open_string(text, at, sign, ended=ended)
        self._depth += 1 if sign in "([{" else -1
        self.is_done = self._depth < 0
        self.is_broken |= self.is_done and sign != ")"
        if not self.is_done:
            self._code_parts.append(sign)
        return at + 1

    def _end_code(self) -> None:
        code = "".join(self._code_parts)
        self._code_parts.clear()
        self._python.append(_KEYWORD.sub(rf"{_MARK}\g<0>", _ZEROS.sub("", code)))

    def _open_string(self, text: str, at: int, sign: str, *, ended: bool) -> int:
        if len(text) - at < 3 and text[at:] == sign * (len(text) - at) and not ended:
            return at  # one quote, an empty string, or three quotes
        self._end_code()
        num_quotes = 3 if text.startswith(sign * 3, at) else 1
        if num_quotes == 1 and text.startswith(sign * 2, at):
            self._python.append(sign * 2)
            return at + 2
        self._quote = sign * num_quotes
        self._before = ""
        self._python.append(self._quote)
        return at + num_quotes


def _skip_space(text: str, at: int) -> int:
    most = min(len(text), at + _MAX_GAP)
    while at < most and text[at].isspace():
        at += 1
    return at


def call_arguments(scan: PythonScan, text: str, tool: Tool | None) -> str:
    """The JSON object of a call's arguments; empty if they are malformed, or an expression. scan:
    has read ``text``, up to the parenthesis that closes the call."""
    if scan.is_broken:
        return ""
    if scan.has_inner_quotes:
        strict = PythonScan(is_strict=True)
        is_whole = strict.feed(text, 0, ended=True) == len(text) and strict.is_done
        if (
            is_whole
            and _is_python(python := strict.python())
            and not keyword_arguments(python, tool)
        ):
            return ""
    return keyword_arguments(scan.python(), tool)


def _is_python(text: str) -> bool:
    try:
        return bool(_expression(f"f({text})"))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


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
        for each in call.keywords:
            if each.arg is None:
                return ""
            found[_unmarked(each.arg)] = _value(each.value)
        return json_text(found)
    except (SyntaxError, ValueError, TypeError, IndexError, MemoryError, RecursionError):
        return ""


def _unmarked(name: str) -> str:
    bare = name.removeprefix(_MARK)
    return bare if keyword.iskeyword(bare) else name


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
    """The value of a node. Raises ValueError for a node that is not a literal, or has no JSON."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if any(key is None for key in node.keys):
            raise ValueError("not a plain dict")
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, (str, int, float)):
        raise ValueError("bytes, complex numbers and ... have no JSON")
    return value
