"""The calls of GLM 4.5, and of GLM 4.7 without the line ends:

<tool_call>weather
<arg_key>place</arg_key>
<arg_value>Bern</arg_value>
</tool_call>
"""

from __future__ import annotations

from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting

GLM = XmlCalls(
    name="glm",
    begin="<tool_call>",
    name_end="",
    end="</tool_call>",
    key_begin="<arg_key>",
    key_end="</arg_key>",
    value_begin="<arg_value>",
    value_end="</arg_value>",
    writing=XmlWriting(
        call=lambda name: (f"<tool_call>{name}\n", "</tool_call>"),
        argument=lambda key, _: (f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        trigger="<tool_call>",
        separator="\n",
    ),
)
