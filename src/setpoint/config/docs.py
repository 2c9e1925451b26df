"""Writes ``docs/flags.md`` from the declarations (``python -m setpoint.config.docs``); a test
compares the two."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Set
from pathlib import Path

from msgspec import structs

from setpoint.config import sglang as spellings
from setpoint.config.commandline import default_text, placeholder
from setpoint.config.commands import COMMANDS, Command
from setpoint.config.environment import ENV_FIELDS
from setpoint.config.groups.declare import Field, Option, Range, Scalar, flag_of
from setpoint.config.options import GROUPS, Options
from setpoint.config.sglang import KNOWN
from setpoint.config.workload import PROFILES, Advice

PURPOSES = {group.name: inspect.getdoc(group.type) or "" for group in structs.fields(Options)}
"""Name of a group of options -> a sentence about it."""
PATH = Path(__file__).parents[3] / "docs" / "flags.md"

_INTRO = """# Options

<!-- Written by `python -m setpoint.config.docs` from src/setpoint/config; change it there. -->

Names, meanings and defaults are those of SGLang 0.5.23. The column *SGLang* is empty for an option
that SGLang does not have; other spellings that both accept follow the word *same*. *Range* lists
the accepted values, and *tune* those worth trying. You may shorten an option to an unambiguous
prefix (`--tp 1`), and write whole numbers of tokens as `32k` (32000) or `32Ki` (32768).
`--config file.yaml` reads options from a file; the command line wins. The server chooses the values
that you do not give; `--log-level debug` and `/server_info` show every value with its reason.

`setpoint serve` takes all options except those under the name of another command. The other
commands take their own and the engine's; they refuse those marked *serve only*, which would have no
effect. `setpoint bench serving` starts no engine and takes only its own.

Options marked *live* can change while a server runs: `setpoint set URL NAME=VALUE ...`, or the
route `/set_internal_state`, changes one or several of them between two steps. A value is checked as
at a start, and `none` returns an option to what the server would choose. Running requests continue,
and their answers stay the same. `/server_info` shows the present values, and the log says who
changed what, with the old and the new value. Two live options are limited by the memory that was
planned at start: `--max-running-requests` by the number of requests that there is room for, and
`--chunked-prefill-size` by the prompt tokens of the largest step. All options that are not live
need a restart.
"""

_WORKLOADS = """
## Workloads

These are the values that `--workload` takes from SGLang's tuning guide of 2026. Explicit options
win. If a CPU or a small GPU gets another value, the log of the start says which and why.

| workload | option | value | reason |
|---|---|---|---|
"""


def flags_markdown() -> str:
    """The whole page."""
    parts = [_INTRO]
    parts += [
        _option_table(fields[0].about.group, fields, about=PURPOSES[group])
        for group, fields in GROUPS.items()
    ]
    parts += [_command(command) for command in COMMANDS.values() if command.own_fields]
    parts.append(_workloads())
    parts.append("\n## Environment variables\n\n| variable | default | meaning |\n|---|---|---|\n")
    parts += [
        f"| `{field.about.name}` | {_code(_env_default(field.default))} |"
        f" {_cell(field.about.help)} |\n"
        for field in ENV_FIELDS
    ]
    parts.append("\n## Other spellings\n\n| written | taken as |\n|---|---|\n")
    parts += [
        f"| `{alias}` | {_code(flag)} |\n"
        for alias, flag in spellings.ALIASES.items()
        if flag in spellings.SUPPORTED
    ]
    missing = len(KNOWN - spellings.SUPPORTED.keys() - spellings.ALIASES.keys())
    rest = (
        f"The other {missing} spellings of SGLang's options (`src/setpoint/config/sglang.py`"
        " lists them all) are accepted with SGLang's own default as their value, and refused by"
        " name with any other; an unknown option is refused with the nearest known one."
    )
    parts.append(f"\n## Not supported yet\n\n{textwrap.fill(rest, 100)}\n")
    return "".join(parts)


def _command(command: Command) -> str:
    others = ", ".join(f"`{flag_of(name)} {value}`" for name, value in command.defaults.items())
    table = _option_table(
        f"`setpoint {command.name}`", command.own_fields, sglang=command.sglang_flags
    )
    return table + (f"\nDefaults that differ from those above: {others}.\n" if others else "")


def _workloads() -> str:
    parts = [_WORKLOADS]
    for profile, recommendations in PROFILES.items():
        for one in recommendations:
            if isinstance(one, Advice):
                parts.append(
                    f"| {profile} | `{flag_of(one.option)}` | {_code(_env_default(one.value))} |"
                    f" {one.why} |\n"
                )
            else:
                parts.append(f"| {profile} | `{flag_of(one.name)}` | {one.value} | {one.why} |\n")
    return "".join(parts)


def _option_table(
    title: str, fields: Iterable[Field[Option]], *, about: str = "", sglang: Set[str] = KNOWN
) -> str:
    """about: a sentence about the group. sglang: the flags that SGLang also has."""
    head = (
        f"\n## {title}\n\n{about and about + chr(10) * 2}"
        "| option | default | range | live | tune | SGLang | meaning |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(_option_row(field, sglang) for field in fields)


def _option_row(field: Field[Option], sglang: Set[str]) -> str:
    about = field.about
    value = "" if field.kind is bool else f" {placeholder(field)}"
    flag = f"{about.short}, {field.flag}" if about.short else field.flag
    cells = (
        f"`{flag}{value}`",
        _code(default_text(field.default)),
        _values(about),
        "yes" if about.live else "",
        _range(about.tunable),
        _sglang_name(field, sglang),
        f"{'*serve only* ' if about.server_only else ''}{about.meaning}",
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


def _values(about: Option) -> str:
    """The values that an option accepts, as far as its declaration limits them."""
    if about.choices:
        return ", ".join(f"`{choice}`" for choice in about.choices)
    low, high = (None if end is None else f"{end:,.16g}" for end in (about.low, about.high))
    if low is None:
        return "" if high is None else f"≤ {high}"
    return f"≥ {low}" if high is None else f"{low} – {high}"


def _sglang_name(field: Field[Option], sglang: Set[str]) -> str:
    """SGLang's name of an option, with its other spellings; empty for Setpoint's own."""
    if field.flag not in sglang:
        return "older guides" if field.about.no_effect else ""
    others = [f"`{name}`" for name, flag in spellings.ALIASES.items() if flag == field.flag]
    return ", ".join(["same", *others])


def _range(tunable: Range | tuple[Scalar, ...] | None) -> str:
    if tunable is None:
        return ""
    if isinstance(tunable, Range):
        return f"{tunable.low:g} – {tunable.high:g}"
    return ", ".join(str(value).lower() for value in tunable)


def _env_default(default: Scalar) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    PATH.write_text(flags_markdown(), encoding="utf-8")
