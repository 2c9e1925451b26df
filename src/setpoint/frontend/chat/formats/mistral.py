"""The calls of Mistral, as older and as newer models write them:

    [TOOL_CALLS][{"name": "weather", "arguments": {"place": "Bern"}}]
    [TOOL_CALLS]weather[ARGS]{"place": "Bern"}

Its chat templates accept only ids of nine letters and digits.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonMachine
from setpoint.frontend.chat.parser import DeltaParser
from setpoint.frontend.chat.request import Tool

_BEGIN = "[TOOL_CALLS]"
_HEADER = re.compile(r"\s*(?P<name>[^\s\[\]{]+)(?:\[CALL_ID\](?P<id>[^\s\[\]{]+))?(?:\[ARGS\])?\s*")
_JSON = JsonCalls(name="mistral", begin=_BEGIN, header=_HEADER)


class Mistral:
    """Implements ToolFormat."""

    name = "mistral"
    needs_special_tokens = True

    def parser(self, tools: Sequence[Tool]) -> DeltaParser:
        return _Parser(_JSON, tools)

    def structure(
        self, tools: Sequence[Tool], *, required: bool, parallel: bool
    ) -> dict[str, Any] | None:
        return None


class _Parser(JsonMachine):
    def _new_id(self) -> str:
        return uuid.uuid4().hex[:9]
