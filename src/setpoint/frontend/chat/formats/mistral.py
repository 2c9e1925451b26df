"""The calls of Mistral, as older and as newer models write them:

    [TOOL_CALLS][{"name": "weather", "arguments": {"place": "Bern"}}]
    [TOOL_CALLS]weather[ARGS]{"place": "Bern"}

Its chat templates accept only ids of nine letters and digits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from setpoint.frontend.chat.chat_request import Tool
from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonMachine, JsonWriting
from setpoint.frontend.chat.parser import DeltaParser
from setpoint.frontend.new_ids import new_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mistral(JsonCalls):
    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(self, tools)


class _Parser(JsonMachine):
    def _new_id(self) -> str:
        return new_hex("call")[:9]


MISTRAL = _Mistral(
    name="mistral",
    begin="[TOOL_CALLS]",
    header=re.compile(
        r"\s*(?P<name>[^\s\[\]{]+)(?:\[CALL_ID\](?P<id>[^\s\[\]{]+))?(?P<due>\[ARGS\])?\s*"
    ),
    written=JsonWriting(section=("[TOOL_CALLS] [", "]")),
)
