"""The calls of DeepSeek V3 and R1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
    ```json
    {"place": "Bern"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

of V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"place": "Bern"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

(on one line), and of V3.2:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="place" string="true">Bern</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

import re

from setpoint.frontend.chat.formats.headed import HeadedCalls
from setpoint.frontend.chat.formats.structure import tag
from setpoint.frontend.chat.formats.xml_calls import XmlCalls
from setpoint.frontend.chat.formats.xml_structure import XmlWriting

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

DEEPSEEK_V3 = HeadedCalls(
    name="deepseekv3",
    section=_SECTION,
    begin=_BEGIN,
    header=re.compile(rf"\s*function{_SEP}\s*(?P<name>[^\s{{<]+)\s*(?:```(?:json)?\s*)?"),
    between="```",
    end=_END,
    tag=lambda name, arguments: tag(
        f"{_BEGIN}function{_SEP}{name}\n```json\n", arguments, f"\n```{_END}"
    ),
    separator="\n",
)

DEEPSEEK_V31 = HeadedCalls(
    name="deepseekv31",
    section=_SECTION,
    begin=_BEGIN,
    header=re.compile(rf"\s*(?P<name>[^\s{{<]+)\s*{_SEP}\s*"),
    end=_END,
    tag=lambda name, arguments: tag(f"{_BEGIN}{name}{_SEP}", arguments, _END),
)

DEEPSEEK_V32 = XmlCalls(
    name="deepseekv32",
    section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    begin='<｜DSML｜invoke name="',
    name_end='">',
    end="</｜DSML｜invoke>",
    key_begin='<｜DSML｜parameter name="',
    key_end=">",
    value_end="</｜DSML｜parameter>",
    writing=XmlWriting(
        section=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        call=lambda name: (f'<｜DSML｜invoke name="{name}">\n', "</｜DSML｜invoke>\n"),
        argument=lambda key, is_string: (
            f'<｜DSML｜parameter name="{key}" string="{"true" if is_string else "false"}">',
            "</｜DSML｜parameter>\n",
        ),
    ),
    key=re.compile(r'(?P<key>[^"]*)"(?:\s+string="(?P<string>true|false)")?\s*'),
)
