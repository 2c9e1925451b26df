"""The calls of Step 3:

<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
<steptml:parameter name="place">Bern</steptml:parameter>
</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>
"""

from __future__ import annotations

import re

from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting

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
    writing=XmlWriting(
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        call=lambda name: (
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        argument=lambda key, _: (f'<steptml:parameter name="{key}">', "</steptml:parameter>\n"),
        separator="\n",
    ),
    key=re.compile(r'(?P<key>[^"]+)"\s*'),
)
