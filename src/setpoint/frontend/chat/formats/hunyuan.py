"""The calls of Hy3:

<tool_calls>
<tool_call>weather<tool_sep>
<arg_key>place</arg_key>
<arg_value>Bern</arg_value>
</tool_call>
</tool_calls>

whose tokenizers may add a suffix to each marker (``<tool_call:opensource>``), and those of
Hunyuan-A13B:

<tool_calls>[{"name": "weather", "arguments": {"place": "Bern"}}]</tool_calls>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import Delta
from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting
from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting
from setpoint.frontend.chat.parser import DeltaParser

_NAMES = "tool_calls|tool_call|tool_sep|arg_key|arg_value"
_SUFFIXED = re.compile(rf"<(/?(?:{_NAMES})):[\w.-]{{1,32}}>")
_CUT = re.compile(r"</?[a-z_]{0,10}(?::[\w.-]{0,32})?\Z")
_MAX_CUT = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hunyuan(XmlCalls):
    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _WithoutSuffixes(XmlCalls.parser(self, tools))

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        return None  # the markers depend on the tokenizer


class _WithoutSuffixes:
    """Implements DeltaParser: gives another one the markers without a suffix."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser
        self._held = ""

    def feed(self, text: str) -> Sequence[Delta]:
        if not text:
            return ()
        text = _SUFFIXED.sub(r"<\1>", self._held + text)
        cut = _CUT.search(text, max(len(text) - _MAX_CUT, 0))
        stop = len(text) if cut is None else cut.start()
        self._held = text[stop:]
        return self._parser.feed(text[:stop])

    def end(self) -> Sequence[Delta]:
        return [*self._parser.feed(self._held), *self._parser.end()]


HUNYUAN = _Hunyuan(
    name="hunyuan",
    section=("<tool_calls>", "</tool_calls>"),
    begin="<tool_call>",
    name_end="<tool_sep>",
    end="</tool_call>",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    writing=XmlWriting(call=lambda name: (name, ""), argument=lambda key, _: (key, "")),
)
HUNYUAN_A13B = JsonCalls(
    name="hunyuan_a13b",
    begin="<tool_calls>",
    end="</tool_calls>",
    written=JsonWriting(section=("<tool_calls>[", "]</tool_calls>")),
)
