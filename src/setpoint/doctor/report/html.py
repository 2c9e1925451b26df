"""Writes a report as one page: without scripts, loading nothing from elsewhere, light and dark,
printable. Everything that comes from a source is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from setpoint.core.version import __version__
from setpoint.doctor.checks.check import Check
from setpoint.doctor.findings import Effect, Finding, Report
from setpoint.doctor.observations import Evidence, Observations
from setpoint.doctor.report import wording
from setpoint.doctor.report.drawing import chart
from setpoint.doctor.report.figures import charts
from setpoint.doctor.report.wording import printable

_WHOLE = re.compile(r"((?:--|#)[a-z][\w-]+)")
"""Options, and fields of a log line."""
_LINE = 400
"""Most characters of a line of a log that are shown; server_args have thousands."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""With this policy a browser loads nothing and runs nothing, whatever a log contains."""


def page(
    report: Report,
    seen: Observations,
    checks: Mapping[str, Check],
    others: Sequence[Report] = (),
) -> str:
    """The page of a report as HTML. ``checks``: by cause. ``others``: reports about other servers
    in the sources."""
    view = _View(report, seen, checks, others)
    body = "".join(part for part in view.parts() if part)
    title = _plain(f"{report.verdict}: {view.title(report.verdict)}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{title}</title><style>{_style()}</style></head>"
        f'<body class="{_plain(report.verdict)}"><main>{body}</main></body></html>\n'
    )


def _style() -> str:
    return files(__package__).joinpath("page.css").read_text(encoding="utf-8")


def _plain(text: str) -> str:
    return escape(printable(text))


def _text(text: str) -> str:
    """The text as prose: words are not divided at hyphens, and numbers stay with their units."""
    parts = _WHOLE.split(printable(text))
    whole = [
        f"<span class=nb>{escape(part)}</span>" if index % 2 else escape(part)
        for index, part in enumerate(parts)
    ]
    return "".join(whole).replace(" %", "&nbsp;%")


def _tag(name: str, text: str, kind: str = "") -> str:
    """The text in a tag; "" if there is no text."""
    attribute = f' class="{kind}"' if kind else ""
    content = _plain(text) if name == "code" else _text(text)
    return f"<{name}{attribute}>{content}</{name}>" if text else ""


def _card(heading: str, content: Iterable[str] | str, kind: str = "") -> str:
    """A card with this heading and content; "" without content."""
    inner = "".join(content)
    head = f"<h2>{heading}</h2>" if heading else ""
    return f'<section class="card {kind}">{head}{inner}</section>' if inner else ""


class _View:
    def __init__(
        self,
        report: Report,
        seen: Observations,
        checks: Mapping[str, Check],
        others: Sequence[Report],
    ) -> None:
        self._report = report
        self._seen = seen
        self._checks = checks
        self._others = others
        self._charts = charts(report, seen)
        self._first = report.findings[0] if report.findings else None

    def title(self, cause: str) -> str:
        return wording.title(cause, self._checks)

    def parts(self) -> Iterator[str]:
        first = self._first
        yield self._top()
        yield self._verdict()
        if first is not None:
            yield f'<div class="pair">{self._prescription(first)}{self._expectation(first)}</div>'
        yield _card("What would help", self._missing())
        yield _card("What the server did", self._drawn())
        evidence = self._report.evidence if first is None else first.evidence
        yield _card("Evidence", _log(evidence, first, several=len(self._report.sources) > 1))
        if first is not None:
            yield _card("What it is not", self._ruled_out(first))
        yield _card("Also found", (self._other(each) for each in self._report.findings[1:]))
        yield _card("Other servers that were read", self._besides())
        yield self._explained()
        yield _card("What was read", self._sources())
        yield f"<footer>Setpoint {_text(__version__)}, setpoint doctor</footer>"

    def _top(self) -> str:
        seconds = self._charts.seconds if self._charts else None
        names = ", ".join(source.name for source in self._report.sources[:3])
        about = wording.about_server(self._seen, seconds)
        return f'<div class="top"><span><b>{_text(names)}</b></span>{_tag("span", about)}</div>'

    def _verdict(self) -> str:
        facts = [f"<span>cause <b>{_text(self._report.verdict)}</b></span>"]
        if self._first is not None:
            facts.append(
                f"<span><b>{_text(wording.percent(self._first.confidence))}</b> sure</span>"
            )
            if self._first.share is not None:
                share = _text(wording.percent(self._first.share))
                facts.append(f"<span>holds for <b>{share}</b> of the time under load</span>")
        coverage = _text(wording.percent(self._report.coverage))
        facts.append(f"<span><b>{coverage}</b> of the batch lines understood</span>")
        title = self.title(self._report.verdict)
        return (
            f'<header class="card verdict">{_tag("h1", title)}'
            f"{_tag('p', wording.proof(self._report.summary, title), 'number')}"
            f'<div class="facts">{"".join(facts)}</div></header>'
        )

    def _prescription(self, finding: Finding) -> str:
        what, more = wording.split(finding.action.text)
        return _card(
            "What to do",
            (
                _tag("p", what, "do"),
                _tag("p", more),
                self._command(finding),
                _definitions({"How to check": finding.verify, "Wrong if": finding.falsify}),
            ),
        )

    def _command(self, finding: Finding) -> str:
        action = finding.action
        command = wording.command_option(action)
        if not command:
            return ""
        how = wording.sentence(wording.how_to_change(action, self._seen.facts))
        live = wording.live_command(action, self._seen)
        while_it_serves = _tag("p", "Or without a restart:", "how") + _tag("code", live, "command")
        return (
            f"{_tag('code', command, 'command')}{_tag('p', how, 'how')}"
            f"{while_it_serves if live else ''}"
        )

    def _expectation(self, finding: Finding) -> str:
        effect = finding.effect
        parts = [] if effect is None else [_interval(effect)]
        if effect is not None:
            parts.append(_tag("p", wording.sentence(wording.effect_text(effect))))
            parts.append(_tag("p", wording.sentence(effect.why), "note"))
        parts.append(_definitions({"Risk": finding.risk}))
        return _card("What to expect", parts)

    def _missing(self) -> Iterator[str]:
        if self._report.missing:
            yield f"<ul>{''.join(_tag('li', each) for each in self._report.missing)}</ul>"

    def _drawn(self) -> Iterator[str]:
        charts = self._charts
        if charts is None:
            return
        yield f'<div class="charts">{"".join(chart(each, charts) for each in charts.figures)}</div>'
        if charts.marks:
            yield '<p class="note legend"><i>▲</i>lines quoted as evidence</p>'
        yield _tag("p", charts.clock, "note")

    def _ruled_out(self, finding: Finding) -> Iterator[str]:
        if finding.ruled_out:
            items = "".join(
                f"{_tag('code', each.cause)}{_tag('span', each.why)}" for each in finding.ruled_out
            )
            yield f'<div class="items">{items}</div>'

    def _other(self, finding: Finding) -> str:
        sure = f"{finding.cause}, {wording.percent(finding.confidence)} sure"
        effect = finding.effect
        expected = "" if effect is None else wording.sentence(wording.effect_text(effect))
        title = self.title(finding.cause)
        return (
            f'<div class="other"><h3>{_text(title)}<span class="pill">{_text(sure)}</span></h3>'
            f"{_tag('p', wording.proof(finding.summary, title))}"
            f"{_tag('p', finding.action.text)}"
            f"{self._command(finding)}{_tag('p', expected, 'note')}"
            f"{self._folded_evidence(finding)}</div>"
        )

    def _folded_evidence(self, finding: Finding) -> str:
        if not finding.evidence:
            return ""
        log = _log(finding.evidence, finding, several=len(self._report.sources) > 1)
        return f'<details class="note"><summary>Evidence</summary>{log}</details>'

    def _besides(self) -> Iterator[str]:
        if self._others:
            items = "".join(
                f"{_tag('code', each.verdict)}{_tag('span', wording.about_other(each))}"
                for each in self._others
            )
            yield f'<div class="items">{items}</div>'

    def _explained(self) -> str:
        check = self._checks.get(self._report.verdict)
        if check is None:
            return ""
        parts = [_tag("p", check.meaning)]
        if check.picture:
            parts.append(f"<pre>{escape(check.picture.strip(chr(10)))}</pre>")
        for heading, text in (
            ("When the doctor reports it", check.rule),
            ("When it does not", check.counter_evidence),
            ("What the guides say", check.guide),
        ):
            parts.append(_tag("h3", heading) + _tag("p", text) if text else "")
        if check.equation:
            parts.append(f"<h3>How the value is computed</h3><pre>{escape(check.equation)}</pre>")
        summary = f"<summary>What {_text(check.cause)} means</summary>"
        return _card("", f"<details>{summary}{''.join(parts)}</details>")

    def _sources(self) -> Iterator[str]:
        numbers = "".join(
            f"<th class=n>{name}</th>" for name in ("lines", "batch lines", "understood")
        )
        head = f"<tr><th>source</th><th>written by</th>{numbers}</tr>"
        rows = "".join(
            f"<tr>{_tag('td', source.name)}<td>{_text(source.generation)}</td>"
            f"<td class=n>{source.num_lines:,}</td><td class=n>{source.num_batch_lines:,}</td>"
            f"<td class=n>{source.num_understood:,}</td></tr>"
            for source in self._report.sources
        )
        yield f'<div class="scroll"><table>{head}{rows}</table></div>'
        for note in wording.notes(self._report):
            yield _tag("p", note, "note")


def _log(evidence: Sequence[Evidence], finding: Finding | None, *, several: bool) -> str:
    rows = "".join(
        f'<span class="where">{_text(wording.where(each, several=several))}</span>'
        f'<span class="line">{_plain(_cut(each.text, finding))}</span>'
        for each in evidence
    )
    return f'<div class="log">{rows}</div>' if rows else ""


def _cut(text: str, finding: Finding | None) -> str:
    part = wording.excerpt(text, finding, _LINE)
    return part if len(part) <= _LINE else f"{part[:_LINE]} …"


def _definitions(items: Mapping[str, str]) -> str:
    rows = "".join(
        f"<div><dt>{name}</dt>{_tag('dd', text)}</div>" for name, text in items.items() if text
    )
    return f"<dl>{rows}</dl>" if rows else ""


def _interval(effect: Effect) -> str:
    """The predicted factor between its bounds, beside today's value."""
    low, expected, high = sorted((effect.low, effect.expected, effect.high))
    begin, end = min(low, 1.0), max(high, 1.0)
    begin, end = max(0.0, begin - 0.15 * (end - begin)), end + 0.15 * (end - begin)

    def place(factor: float) -> float:
        return 100 * (factor - begin) / (end - begin or 1.0)

    bounds = "".join(
        f'<span class="{name}" style="left:{place(factor):.1f}%">{wording.factor(factor)}</span>'
        for name, factor in (("low", low), ("high", high))
        if abs(place(factor) - place(1.0)) > 12
    )
    return (
        '<div class="effect"><div class="track"></div>'
        f'<div class="range" style="left:{place(low):.1f}%;width:{place(high) - place(low):.1f}%">'
        f'</div><div class="today" style="left:{place(1.0):.1f}%"></div>'
        f'<div class="dot" style="left:{place(expected):.1f}%"></div>'
        f'<span class="expected" style="left:{place(expected):.1f}%">{wording.factor(expected)}'
        f'</span><span class="now" style="left:{place(1.0):.1f}%">today</span>{bounds}</div>'
    )
