"""Which texts are the arguments of a call: a call whose arguments are no JSON object is not
finished, in every format."""

from __future__ import annotations

from typing import Any

import msgspec

from setpoint.frontend.chat.formats.scanning import Markers


def arguments_object(value: str) -> str:
    """Arguments as the text of a JSON object: some models write null for none, or put the object
    into a string. Empty for anything else, with which no call is finished."""
    if value == "null":
        return "{}"
    if value.startswith("{"):
        return value
    inner = (decoded_string(value) or "").strip()
    return inner if isinstance(_decoded(inner), dict) else ""


def decoded_string(value: str) -> str | None:
    """What a JSON string says; None if the text is none."""
    decoded = _decoded(value)
    return decoded if isinstance(decoded, str) else None


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None


class OtherArguments:
    """Implements Scan for arguments that begin with no brace. They end at a marker, or with the
    answer, and are passed on as they are if they are no object, either."""

    taken_back = ""

    def __init__(self, markers: Markers) -> None:
        self.is_done = False
        self.is_broken = False
        self._markers = markers
        self._parts: list[str] = []

    def feed(self, text: str, at: int) -> tuple[str, int]:
        found = self._markers.find(text, at)
        stop = self._markers.cut(text, at) if found is None else found.start()
        self._parts.append(text[at:stop])
        return ("" if found is None else self.end()), stop

    def end(self) -> str:
        value = "".join(self._parts).strip()
        arguments = arguments_object(value)
        self.is_done = True
        self.is_broken = not arguments
        return arguments or value
