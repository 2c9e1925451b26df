"""The calls of Qwen3 Coder, also of Qwen 3.5, MiMo, Nemotron 3 and Step 3.5:

<tool_call>
<function=weather>
<parameter=place>
Bern
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting

QWEN3_CODER = XmlCalls(
    name="qwen3_coder",
    section=("<tool_call>", "</tool_call>"),
    bare=True,
    begin="<function=",
    name_end=">",
    end="</function>",
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    framed=True,
    writing=XmlWriting(
        call=lambda name: (f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"),
        argument=lambda key, _: (f"<parameter={key}>\n", "\n</parameter>\n"),
        trigger="<tool_call>",
        separator="\n",
    ),
)
