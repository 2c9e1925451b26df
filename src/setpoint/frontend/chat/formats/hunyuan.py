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
from dataclasses import dataclass, replace
from typing import Any

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.deltas import Delta, TextDelta
from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting
from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting
from setpoint.frontend.chat.parser import DeltaParser

_SUFFIX = r":[\w.-]{1,32}"
_SECTION = re.compile(rf"<tool_calls(?P<suffix>(?:{_SUFFIX})?)>\s{{0,64}}+<tool_call(?P=suffix)>")
_CUT = re.compile(
    rf"(?:<tool_calls(?:{_SUFFIX})?>\s{{0,64}}+)?(?:<[a-z_]{{0,10}}(?::[\w.-]{{0,32}})?)?\Z"
)
_MAX_CUT = 192
_NAME = re.compile(r"<(/?[a-z_]+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hunyuan(XmlCalls):
    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(self, tools)

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        return None  # the markers depend on the tokenizer


class _Parser:
    """Implements DeltaParser. The first section of calls shows which suffix the markers have; the
    same words with another one are text."""

    def __init__(self, form: XmlCalls, tools: Sequence[Tool]) -> None:
        self._form = form
        self._tools = tools
        self._parser = XmlCalls.parser(form, tools)
        self._held = ""
        """The end of the text so far, which may begin a section."""
        self._is_certain = False

    def feed(self, text: str) -> Sequence[Delta]:
        if self._is_certain or not text:
            return self._parser.feed(text)
        text = self._held + text
        found = _SECTION.search(text)
        if found is not None:
            self._is_certain = True
            deltas = self._parser.feed(text[: found.start()])
            left = "".join(
                delta.text for delta in self._parser.end() if isinstance(delta, TextDelta)
            )
            self._parser = XmlCalls.parser(_suffixed(self._form, found["suffix"]), self._tools)
            return [*deltas, *self._parser.feed(left + text[found.start() :])]
        cut = _CUT.search(text, max(len(text) - _MAX_CUT, 0))
        assert cut is not None, "an empty end matches"
        self._held = text[cut.start() :]
        return self._parser.feed(text[: cut.start()])

    def end(self) -> Sequence[Delta]:
        held = () if self._is_certain else self._parser.feed(self._held)
        return [*held, *self._parser.end()]


def _suffixed(form: XmlCalls, suffix: str) -> XmlCalls:
    def written(marker: str) -> str:
        return _NAME.sub(rf"<\1{suffix}>", marker)

    return replace(
        form,
        section=(written(form.section[0]), written(form.section[1])),
        begin=written(form.begin),
        name_end=written(form.name_end),
        end=written(form.end),
        key_begin=written(form.key_begin),
        key_end=written(form.key_end),
        value_begin=written(form.value_begin),
        value_end=written(form.value_end),
    )


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
