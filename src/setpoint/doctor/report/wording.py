"""Words of a report that the terminal and the page share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from setpoint.doctor.checks.check import Check
from setpoint.doctor.findings import Action, Effect, Finding, Report
from setpoint.doctor.observations import Evidence, Facts, Observations, Source
from setpoint.doctor.report.figures import Charts, Figure, duration

_KINDS = {
    "log": "log",
    "metrics": "metrics",
    "server": "server",
    "recording": "recording",
    "live": "live server",
}


def printable(text: str) -> str:
    """A line of a log as it may be shown: without characters that control a terminal or change the
    direction of the text."""
    return "".join(
        char if char.isprintable() else " " if char in "\t\n\r" else "\ufffd" for char in text
    )


def number(value: float) -> str:
    """The value with three or four digits: "1,234", "12.3", "0.43"; large ones in powers of ten."""
    if abs(value) >= 1e9:
        return f"{value:.2g}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """The share in percent, never rounded up to 100 %."""
    rounded = round(100 * share)
    return f"{99 if rounded == 100 and share < 1 else rounded} %"


LITTLE = 0.08
"""A change of a figure that is hardly more than the difference between two measurements."""


def effect_text(effect: Effect) -> str:
    """The figure and how it should change: "output throughput should rise by about 70 % (between
    30 % and 110 %)"."""
    low, expected, high = sorted((effect.low, effect.expected, effect.high))
    if expected >= 2:
        how = f"be about {expected:.1f} times today's (between {low:.1f} and {high:.1f} times)"
    elif low >= 1 and expected > 1.005:
        how = f"rise by about {_gain(expected)} (between {_gain(low)} and {_gain(high)})"
    elif high <= 1 and expected < 0.995:
        how = f"fall by about {_gain(expected)} (between {_gain(high)} and {_gain(low)})"
    else:
        verb = "rise" if expected > 1 else "fall"
        by = f"{verb} by about {_gain(expected)}"
        how = "change little" if abs(expected - 1) < 0.005 else by
        how += f" (between {_signed(low)} and {_signed(high)})"
    text = f"{effect.figure} should {how}"
    return f"there is little to gain: {text}" if is_small(effect) else text


def is_small(effect: Effect) -> bool:
    """Whether a change may gain nothing, and is not expected to gain much."""
    change = abs(effect.expected - 1)
    return effect.low <= 1 <= effect.high and 0.005 <= change < LITTLE


def _gain(factor: float) -> str:
    return f"{abs(round(100 * (factor - 1)))} %"


def _signed(factor: float) -> str:
    change = round(100 * (factor - 1))
    return f"{'−' if change < 0 else '+'}{abs(change)} %"


def command_option(action: Action) -> str:
    """The option and value for the command line; "" if the action is not an option or removes
    one."""
    if action.flag is None or action.value is False:
        return ""
    if action.value in (None, True):
        return action.flag
    return f"{action.flag} {value_text(action.value)}"


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def option(flag: str) -> str:
    """The name of the field that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


def present(action: Action, facts: Facts) -> str:
    """The present value of the option, as the server said it; "" if it is unknown."""
    if action.flag is None:
        return ""
    name = option(action.flag)
    asked, held = facts.options.get(name), getattr(facts, name, None)
    if asked is None or held is None or asked == held:
        value = held if asked is None else asked
        return "" if value is None else value_text(value)
    return f"{value_text(asked)}, which the server changed to {value_text(held)}"


def title(cause: str, checks: Mapping[str, Check]) -> str:
    check = checks.get(cause)
    return check.title if check else printable(cause)


def split(text: str) -> tuple[str, str]:
    """The first sentence of a text, and the others."""
    first, stop, rest = text.partition(". ")
    return (first + ".", rest) if stop else (text, "")


def how_to_change(action: Action, facts: Facts) -> str:
    """The present value of the option, and whether the change needs a restart; "" if the action is
    not an option."""
    if action.flag is None:
        return ""
    now = present(action, facts)
    return f"now {now}; needs a restart" if now else "needs a restart"


def live_command(action: Action, seen: Observations) -> str:
    """The command that changes the option of a running Setpoint; "" if that is not possible."""
    if action.flag is None or not action.live or seen.facts.engine != "setpoint":
        return ""
    url = next((source.name for source in seen.sources if "://" in source.name), "URL")
    url = printable(url.rstrip("/").removesuffix("/metrics"))
    return f"setpoint set {url} {option(action.flag)}={value_text(action.value)}"


def about_source(source: Source) -> str:
    """ "server.log: log of SGLang 0.5.23, 12,204 lines (840 about batches)"."""
    of = f" of {printable(source.generation)}" if source.generation else ""
    text = f"{printable(source.name)}: {_KINDS[source.kind]}{of}"
    if source.num_lines:
        text += f", {source.num_lines:,} lines ({source.num_batch_lines:,} about batches)"
    return text


def about_server(seen: Observations, seconds: float | None) -> str:
    """Which server was observed, and for how long; "" if nothing is known."""
    parts = [printable(seen.facts.model)] if seen.facts.model else []
    if len(seen.ranks) > 1:
        parts.append(f"{len(seen.ranks)} ranks")
    if seconds:
        parts.append(duration(seconds))
    return ", ".join(parts)


def about_other(report: Report) -> str:
    """ "b.log: healthy. …"."""
    names = " and ".join(source.name for source in report.sources)
    return f"{names}: {report.verdict}. {report.summary}"


def coverage_warning(report: Report) -> str:
    """A warning if some batch lines were not understood; "" if nearly all were."""
    if report.coverage >= 0.95:
        return ""
    unknown: dict[str, int] = {}
    for source in report.sources:
        for name, count in source.unknown_fields.items():
            unknown[name] = unknown.get(name, 0) + count
    names = sorted(unknown, key=lambda name: -unknown[name])[:3]
    fields = f"; unknown fields: {', '.join(map(printable, names))}" if names else ""
    return f"Only {percent(report.coverage)} of the batch lines were fully understood{fields}."


def notes(report: Report) -> list[str]:
    """What the reader should know about the sources."""
    found = [printable(note) for source in report.sources for note in source.notes]
    warning = coverage_warning(report)
    return [*found, warning] if warning else found


def factor(value: float) -> str:
    return f"× {value:.2g}" if value < 10 else f"× {value:.0f}"


def of_figure(figure: Figure, charts: Charts) -> str:
    """ "median 43 %, max 47 %", in the steady phases if there are any."""
    middle, most = charts.typical(figure)
    if figure.unit == "%":
        return f"median {percent(middle / 100)}, max {percent(most / 100)}"
    if figure.bars:
        total = sum(reading.value for line in figure.lines.values() for reading in line)
        return f"{number(total)} in total"
    if figure.limit is not None:
        return f"median {number(middle)}, {figure.limit_name} {number(figure.limit)}"
    return f"median {number(middle)}, max {number(most)}{figure.unit}"


def where(evidence: Evidence, *, several: bool) -> str:
    """ "line 1,204"; with the source if there are several."""
    line = f"line {evidence.line:,}" if evidence.line else "measured"
    return f"{evidence.source} {line}" if several and evidence.source else line


def excerpt(text: str, finding: Finding | None, size: int) -> str:
    """The part of a long line that names the option of the finding, or else its beginning."""
    name = option(finding.action.flag) if finding and finding.action.flag else ""
    at = text.find(name) if name else -1
    if len(text) <= size or at < 0 or at + len(name) + 16 <= size:
        return text
    begin = text.rfind(" ", 0, max(0, at - size // 4)) + 1
    return f"… {text[begin:]}"


def proof(summary: str, heading: str) -> str:
    """The summary without the title with which it may begin."""
    return sentence(summary.removeprefix(f"{heading}: "))


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop; "" stays ""."""
    if not text:
        return ""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
