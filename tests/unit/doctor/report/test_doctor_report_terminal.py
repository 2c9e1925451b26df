"""What the terminal shows of a report: the verdict first, one screen, units, no control characters
of a log, and plain ASCII where there is nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from doctor_report_cases import empty_handed_report, finding, healthy_report, report, seen
from rich.console import Console

from setpoint.doctor.checks import BY_CAUSE
from setpoint.doctor.findings import Action, Effect, Report, RuledOut
from setpoint.doctor.observations import Evidence, Facts, Observations, Source
from setpoint.doctor.report import wording
from setpoint.doctor.report.terminal import MAX_LINES, print_report

EMPTY = Observations(sources=[Source("x.log", "log")], facts=Facts(), ranks=[])


def shown(
    of: Report,
    observed: Observations | None = None,
    *,
    width: int = 100,
    encoding: str = "utf-8",
    color: bool = False,
    others: tuple[Report, ...] = (),
    everything: bool = False,
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    console = Console(file=file, width=width, highlight=False, force_terminal=color or None)
    print_report(console, of, observed or seen(), BY_CAUSE, others, everything=everything)
    return raw.getvalue().decode(encoding)


def test_the_verdict_comes_first_then_the_number_then_what_to_type_and_to_expect() -> None:
    text = shown(report())
    order = [
        "seq-cap, 94 % sure",
        "All 64 slots were taken in 97 % of the time",
        "--max-running-requests 148   (now 64; needs a restart)",
        "Output throughput should rise by about 70 % (between 30 % and 110 %).",
        "KV pool in use",
        "Evidence",
        "What it is not",
        "--cuda-graph-max-bs 64",
        "server.log: log of SGLang 0.5.4, 12,204 lines (840 about batches)",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "setpoint set" not in text, "SGLang has no such command"


@pytest.mark.parametrize("width", [72, 80, 100, 200])
@pytest.mark.parametrize("make", [report, healthy_report, empty_handed_report])
def test_a_report_is_one_screen(make: Callable[[], Report], width: int) -> None:
    lines = shown(make(), width=width).splitlines()
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= min(width, 100)
    assert lines == [line.rstrip() for line in lines]


def test_a_report_with_far_too_much_is_still_one_screen_and_all_of_it_is_there_if_asked() -> None:
    much = replace(
        finding(),
        evidence=tuple(Evidence(line, f"Decode batch {line} " * 9) for line in range(1, 41)),
        ruled_out=tuple(RuledOut(f"cause-{n}", "for this reason " * 9) for n in range(20)),
    )
    long = replace(report(), findings=[much, *report().findings[1:] * 12])
    text = shown(long)
    assert len(text.splitlines()) <= MAX_LINES
    assert "line 1 " in text
    everything = shown(long, everything=True)
    assert all(f"line {line} " in everything for line in range(1, 41))
    assert all(f"cause-{n} " in everything for n in range(20))


def test_piped_output_has_no_colours_and_a_terminal_has() -> None:
    assert "\x1b" not in shown(report())
    assert "\x1b[" in shown(report(), color=True)


def test_plain_ascii_where_the_terminal_has_nothing_else() -> None:
    lines = shown(report(), encoding="ascii").splitlines()
    assert len(lines) <= MAX_LINES
    assert any("*****" in line for line in lines), "the plots are there"
    assert "?" not in "".join(lines).replace("?s", "")


def test_a_log_cannot_steer_the_terminal() -> None:
    evil = "Decode batch \x1b[2J\x1b]0;title\x07 \u202etxet \x9b31m [bold]x[/bold] \r end"
    bad = replace(finding(), evidence=(Evidence(3, evil),), summary=evil)
    text = shown(replace(report(), findings=[bad], summary=evil), everything=True)
    assert not {char for char in text if not char.isprintable()} - {"\n"}
    assert "[bold]x[/bold]" in text, "a log's brackets are text"


def test_nothing_to_draw() -> None:
    text = shown(empty_handed_report(), EMPTY)
    assert "not-enough-evidence" in text
    assert "Log a minute or more while clients send requests." in text
    assert "KV pool in use" not in text
    assert "Only 62 % of the batch lines were fully understood." in text


def test_the_other_servers_in_the_sources_are_named() -> None:
    other = replace(
        report(),
        verdict="oom-init",
        summary="The weights did not fit.",
        sources=[Source("b", "log")],
    )
    assert "b: oom-init. The weights did not fit." in shown(healthy_report(), others=(other,))


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1.3, 1.7, 2.1), "rise by about 70 % (between 30 % and 110 %)"),
        ((1.8, 2.4, 3.1), "be about 2.4 times today's (between 1.8 and 3.1 times)"),
        ((0.05, 0.1, 0.3), "fall by about 90 % (between 70 % and 95 %)"),
        ((0.9, 1.0, 1.1), "change little (between −10 % and +10 %)"),
        ((0.9, 1.2, 1.6), "rise by about 20 % (between −10 % and +60 %)"),
    ],
)
def test_an_effect_in_words(factors: tuple[float, float, float], words: str) -> None:
    assert wording.effect_text(Effect("output throughput", *factors, why="")) == (
        f"output throughput should {words}"
    )


def test_an_effect_that_is_hardly_one_begins_with_that() -> None:
    effect = Effect("output throughput", 0.9, 1.04, 1.3, why="")
    assert wording.effect_text(effect) == (
        "there is little to gain: output throughput should rise by about 4 % (between −10 % and"
        " +30 %)"
    )


def test_what_to_type() -> None:
    assert wording.command_option(Action("x", "--schedule-conservativeness", "decrease", 0.35)) == (
        "--schedule-conservativeness 0.35"
    )
    assert wording.command_option(Action("x", "--enable-mixed-chunk", "set", True)) == (
        "--enable-mixed-chunk"
    )
    assert wording.command_option(Action("send more")) == ""
    ours = seen()
    ours.facts.engine = "setpoint"
    live = Action("x", "--max-running-requests", "increase", 148, live=True)
    assert wording.live_command(live, ours) == "setpoint set URL max_running_requests=148"
    assert wording.live_command(live, seen()) == "", "SGLang has no such command"
    lowered = seen().facts
    lowered.max_running_requests = 50
    assert wording.how_to_change(live, lowered) == (
        "now 64, which the server changed to 50; needs a restart"
    )


def test_a_share_is_never_rounded_to_all() -> None:
    assert [wording.percent(share) for share in (0.0, 0.427, 0.996, 1.0)] == [
        "0 %",
        "43 %",
        "99 %",
        "100 %",
    ]


def test_a_long_line_is_shown_where_it_names_the_option() -> None:
    line = "server_args=ServerArgs(" + "x=1, " * 400 + "max_running_requests=64, y=2)"
    long = replace(finding(), evidence=(Evidence(1, line),))
    assert "max_running_requests=64" in shown(replace(report(), findings=[long]))
