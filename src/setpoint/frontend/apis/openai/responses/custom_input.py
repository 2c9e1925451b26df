"""Extracts the input of a custom tool from the JSON arguments of its call while they arrive."""

from __future__ import annotations

import json
import re
from typing import Any

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_OPEN = re.compile(r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?')
_CONTENT = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*', re.DOTALL)
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class CustomInput:
    """Passes on the text in ``{"input": "…"}`` as it arrives. Arguments in another form, which an
    unconstrained model may write, are passed on when they are complete."""

    def __init__(self) -> None:
        self._raw = ""
        self._at = 0
        """Index of the first character that has not been passed on; 0 before the text begins."""
        self._is_other = False
        """Whether the arguments have another form."""

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments; returns the text that it completes."""
        self._raw += arguments
        if self._is_other:
            return ""
        if not self._at:
            opened = _OPENING.match(self._raw)
            if opened is None:
                self._is_other = _MAY_OPEN.fullmatch(self._raw) is None
                return ""
            self._at = opened.end()
        found = _CONTENT.match(self._raw, self._at)
        assert found is not None, "it matches the empty text"
        content = _HALF_PAIR.sub("", found.group())
        self._at += len(content)
        try:
            return _sendable(json.loads(f'"{content}"', strict=False))
        except ValueError:  # an invalid JSON escape
            return content

    def end(self) -> str:
        """The text that ``feed`` has not returned."""
        if self._at:
            return ""
        try:
            return _sendable(_text_in(json.loads(self._raw, strict=False), self._raw))
        except (ValueError, RecursionError):
            return self._raw


def _text_in(value: Any, raw: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if isinstance(value.get("input"), str):
            return str(value["input"])
        values = list(value.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
    return raw


def _sendable(text: str) -> str:
    """The text with "?" in place of each lone surrogate, which UTF-8 cannot represent."""
    return text.encode(errors="replace").decode()
