"""The calls of MiniMax M2:

<minimax:tool_call>
<invoke name="weather">
<parameter name="place">Bern</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re

from setpoint.frontend.chat.formats.xml_calls import XmlCalls

MINIMAX_M2 = XmlCalls(
    name="minimax-m2",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    begin='<invoke name="',
    name_end='">',
    end="</invoke>",
    key_begin='<parameter name="',
    key_end=">",
    value_end="</parameter>",
    key=re.compile(r'(?P<key>[^"]*)"\s*'),
)
