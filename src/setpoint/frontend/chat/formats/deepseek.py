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

V4 calls the outer element tool_calls; V4.1 calls it calls, with a space before each name.
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
    header=re.compile(
        rf"\s*function{_SEP}\s*(?P<name>[^\s{{<]+)"
        r"\s*(?:(?P<due>```(?:json)?[^\S\n]*\n)\s*|```(?:json)?\s*)?"
    ),
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
    header=re.compile(rf"\s*(?P<name>[^\s{{<]+)\s*(?P<due>{_SEP})\s*"),
    end=_END,
    tag=lambda name, arguments: tag(f"{_BEGIN}{name}{_SEP}", arguments, _END),
)


def _elements(name: str, *, section: str, space: str = "") -> XmlCalls:
    """The elements of V3.2 and later. space: the text after the mark in a tag."""
    mark = f"｜DSML｜{space}"
    return XmlCalls(
        name=name,
        section=(f"<{mark}{section}>", f"</{mark}{section}>"),
        begin=f'<{mark}invoke name="',
        name_end='">',
        end=f"</{mark}invoke>",
        key_begin=f'<{mark}parameter name="',
        key_end=">",
        value_end=f"</{mark}parameter>",
        key=re.compile(r'(?P<key>[^"]+)"(?:\s+string="(?P<string>true|false)")?\s*'),
        writing=XmlWriting(
            section=(f"<{mark}{section}>\n", f"</{mark}{section}>"),
            call=lambda name: (f'<{mark}invoke name="{name}">\n', f"</{mark}invoke>\n"),
            argument=lambda key, is_string: (
                f'<{mark}parameter name="{key}" string="{"true" if is_string else "false"}">',
                f"</{mark}parameter>\n",
            ),
        ),
    )


DEEPSEEK_V32 = _elements("deepseekv32", section="function_calls")
DEEPSEEK_V4 = _elements("deepseekv4", section="tool_calls")
DEEPSEEK_V41 = _elements("deepseekv41", section="calls", space=" ")
