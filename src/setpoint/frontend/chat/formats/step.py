"""The calls of Step 3:

<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
<steptml:parameter name="place">Bern</steptml:parameter>
</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>
"""

from __future__ import annotations

import re

from setpoint.frontend.chat.formats.xml_calls import XmlCalls

STEP3 = XmlCalls(
    name="step3",
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    passed=("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_call_end｜>"),
    begin='<steptml:invoke name="',
    name_end='">',
    end="</steptml:invoke>",
    key_begin='<steptml:parameter name="',
    key_end=">",
    value_end="</steptml:parameter>",
    key=re.compile(r'(?P<key>[^"]*)"\s*'),
)
