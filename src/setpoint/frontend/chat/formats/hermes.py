"""The calls of Hermes, Qwen 2.5 and Qwen 3, and of models that were tuned like them:

<tool_call>
{"name": "weather", "arguments": {"place": "Bern"}}
</tool_call>
"""

from __future__ import annotations

from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting

HERMES = JsonCalls(
    name="hermes",
    begin="<tool_call>",
    end="</tool_call>",
    written=JsonWriting("<tool_call>\n", "\n</tool_call>", "\n"),
)
