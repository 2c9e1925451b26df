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
from setpoint.frontend.chat.formats.xml_structure import XmlWriting

MINIMAX_M2 = XmlCalls(
    name="minimax-m2",
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    begin='<invoke name="',
    name_end='">',
    end="</invoke>",
    key_begin='<parameter name="',
    key_end=">",
    value_end="</parameter>",
    writing=XmlWriting(
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        call=lambda name: (f'<invoke name="{name}">\n', "</invoke>\n"),
        argument=lambda key, _: (f'<parameter name="{key}">', "</parameter>\n"),
    ),
    key=re.compile(r'(?P<key>[^"]+)"\s*'),
)
