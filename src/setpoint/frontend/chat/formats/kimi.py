"""The calls of Kimi K2, which number themselves through the whole conversation:

    <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>
    {"place": "Bern"}<|tool_call_end|><|tool_calls_section_end|>

(on one line). Some answers have only the number.
"""

from __future__ import annotations

import re
from typing import Any

from setpoint.frontend.chat.formats.headed import HeadedCalls
from setpoint.frontend.chat.formats.structure import Format, tag

_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


def _tag(name: str, arguments: dict[str, Any]) -> Format:
    number = {"type": "regex", "pattern": "[0-9]{1,4}"}
    mark = {"type": "const_string", "value": _ARGUMENTS}
    content = {"type": "sequence", "elements": [number, mark, arguments]}
    return tag(f"{_BEGIN}functions.{name}:", content, _END)


KIMI_K2 = HeadedCalls(
    name="kimi_k2",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin=_BEGIN,
    header=re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s{<:]+)(?::[0-9]+)?)\s*"
        + rf"(?P<due>{re.escape(_ARGUMENTS)})\s*"
    ),
    end=_END,
    counts=True,
    tag=_tag,
)
