"""The calls of Hunyuan:

<tool_calls>[{"name": "weather", "arguments": {"place": "Bern"}}]</tool_calls>
"""

from __future__ import annotations

from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting

HUNYUAN = JsonCalls(
    name="hunyuan",
    begin="<tool_calls>",
    end="</tool_calls>",
    written=JsonWriting(section=("<tool_calls>[", "]</tool_calls>")),
)
