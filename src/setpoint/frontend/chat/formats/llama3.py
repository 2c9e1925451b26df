"""The calls of Llama 3.1 to 3.3, with or without the marker; also of models whose template asks for
JSON:

    <|python_tag|>{"name": "weather", "parameters": {"place": "Bern"}}
"""

from __future__ import annotations

from setpoint.frontend.chat.formats.json_calls import JsonCalls, JsonWriting

LLAMA3 = JsonCalls(
    name="llama3",
    begin="<|python_tag|>",
    may_be_bare=True,
    separators=";,",
    arguments="parameters",
    written=JsonWriting(before="<|python_tag|>", between="; "),
)
