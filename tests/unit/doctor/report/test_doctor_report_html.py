"""The page of a report: the same content as the terminal, nothing from elsewhere, everything
escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from doctor_report_cases import empty_handed_report, finding, healthy_report, report, seen

from setpoint.doctor.checks import BY_CAUSE
from setpoint.doctor.findings import Report
from setpoint.doctor.observations import Evidence, Facts, Observations
from setpoint.doctor.report.html import page

VOID = {"meta", "line", "rect", "path", "br"}


class Balance(HTMLParser):
    """Fails on a tag that is not closed where it should be; collects the text and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def read(html: str) -> Balance:
    found = Balance()
    found.feed(html)
    assert found.open == []
    return found


def test_the_page_says_what_the_terminal_says() -> None:
    text = "".join(read(page(report(), seen(), BY_CAUSE)).words)
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    for said in (
        report().summary,
        finding().action.text,
        "--max-running-requests 148",
        "Now 64; needs a restart.",
        "× 1.7",
        finding().risk,
        finding().verify,
        finding().falsify,
        finding().evidence[0].text,
        finding().ruled_out[0].why,
        "--cuda-graph-max-bs 64",
        "SGLang 0.5.4",
        BY_CAUSE["seq-cap"].meaning,
    ):
        assert said in text


@pytest.mark.parametrize("make", [report, healthy_report, empty_handed_report])
def test_the_page_needs_nothing_else(make: Callable[[], Report]) -> None:
    html = page(make(), seen(ranks=2), BY_CAUSE)
    found = read(html)
    assert not found.tags & {"script", "link", "img", "iframe", "object", "form", "a"}
    assert not re.search(r"(https?:)?//|@import|url\(|\son\w+=", html)
    assert "default-src 'none'" in html
    assert len(html) < 200_000


def test_a_log_cannot_write_into_the_page() -> None:
    evil = "</style><script>alert(1)</script><img src=x onerror=alert(1)> \" ' & \x1b[31m \u202e"
    bad = replace(
        finding(),
        cause=evil,
        summary=evil,
        evidence=(Evidence(1, evil, source=evil),),
        action=replace(finding().action, text=evil, flag=evil, value=evil),
        risk=evil,
    )
    observed = seen(ranks=2)
    observed.ranks[0].name = evil
    observed.facts.model = evil
    observed.sources[0].name = observed.sources[0].generation = evil
    observed.sources[0].notes.append(evil)
    made = replace(
        report(),
        verdict=evil,
        summary=evil,
        findings=[bad, bad],
        sources=observed.sources,
        missing=(evil,),
    )
    html = page(made, observed, BY_CAUSE, [made])
    found = read(html)
    assert not found.tags & {"script", "img"}
    assert not {name for name in found.attributes if name.startswith("on")}
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_a_page_without_charts_and_facts() -> None:
    html = page(empty_handed_report(), Observations([], Facts(), []), BY_CAUSE)
    assert "What the server did" not in html
    assert "Keep the lines from the start of the server" in html
