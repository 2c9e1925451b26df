"""Charts: the lines go where the values are, silences stay empty, axes have units."""

from __future__ import annotations

import pytest
from doctor_report_cases import BEGAN, report, seen
from hypothesis import given, settings
from hypothesis import strategies as st

from setpoint.core.moments import Moment
from setpoint.doctor.findings import Report
from setpoint.doctor.observations import Facts, Observations, Rank, Source
from setpoint.doctor.report.figures import Charts, Figure, charts, duration
from setpoint.doctor.report.plots import ASCII, UNICODE, CharacterSet, label_width, phases, plot
from setpoint.doctor.report.wording import of_figure


def drawn(moments: list[Moment], **facts: int) -> Charts:
    observed = Observations([Source("x", "log")], Facts(**facts), [Rank("", moments)])
    made = charts(Report("healthy", "", [], 1.0, []), observed)
    assert made is not None
    return made


def rows(made: Charts, *, width: int = 40, height: int = 4) -> list[str]:
    lines = plot(made.figures[0], made, width=width, height=height, script=ASCII)
    return [line.plain for line in lines[1:-1]]


def test_a_value_stands_in_its_row() -> None:
    made = drawn([Moment(at=at, seconds=1, usage=0.02 if at < 50 else 0.99) for at in range(100)])
    picture = rows(made)
    assert picture[0].endswith("*" * 10)
    assert "*" * 10 in picture[-1]
    assert picture[-1].rstrip().endswith("*"), "the step is connected"


def test_a_silence_stays_empty() -> None:
    times = [*range(20), *range(980, 1000)]
    picture = rows(drawn([Moment(at=at, seconds=1, usage=0.5) for at in times]))
    assert "*" + " " * 25 in "".join(picture)


def with_rest(rest_s: float) -> Charts:
    """A minute under load, a rest that is one moment, and another minute."""
    load = {"seconds": 1, "running": 8.0, "new_tokens": 20, "cached_tokens": 980}
    times = [*range(60), *range(60 + int(rest_s), 120 + int(rest_s))]
    rest = Moment(at=60, seconds=rest_s, running=0.0)
    return drawn(
        sorted([*(Moment(at=at, **load) for at in times), rest], key=lambda moment: moment.at)
    )


def of(made: Charts, title: str) -> Figure:
    return next(figure for figure in made.figures if figure.title == title)


@pytest.mark.parametrize("rest_s", [12.0, 40.0, 420.0])
@pytest.mark.parametrize("script", [ASCII, UNICODE])
def test_a_rest_is_level_and_what_it_does_not_tell_is_not_drawn(
    rest_s: float, script: CharacterSet
) -> None:
    made, width, height = with_rest(rest_s), 120, 5

    def cells(title: str) -> list[set[int]]:
        """For each column well inside of the rest, the rows from the top that have something."""
        lines = plot(of(made, title), made, width=width, height=height, script=script)[1:-1]
        label = label_width(of(made, title)) + 1
        plain = [line.plain[label:] for line in lines]
        first, last = (round(at / made.seconds * len(plain[0])) for at in (60, 60 + rest_s))
        return [
            {row for row in range(height) if plain[row][column] != " "}
            for column in range(first + 2, last - 2)
        ]

    assert set(map(frozenset, cells("Running requests"))) == {frozenset({height - 1})}
    assert set(map(frozenset, cells("Prefix cache hits"))) == {frozenset()}


def test_the_four_figures_come_first_and_a_far_limit_is_left_out() -> None:
    made = charts(report(), seen())
    assert made is not None
    titles = [figure.title for figure in made.figures]
    assert titles[:4] == [
        "KV pool in use",
        "Running requests",
        "Waiting requests",
        "Output throughput",
    ]
    assert made.figures[1].limit == 64
    far = drawn([Moment(at=at, seconds=1, running=3) for at in range(9)], max_running_requests=4096)
    assert far.figures[0].drawn_limit is None
    assert of_figure(far.figures[0], far) == "median 3, limit 4,096"
    assert far.figures[0].top == 3


def test_every_rank_has_a_line() -> None:
    made = charts(report(), seen(ranks=3))
    assert made is not None
    assert set(made.figures[0].lines) == {"DP0 TP0", "DP1 TP0", "DP2 TP0"}


def test_phases_and_evidence_are_marked() -> None:
    made = charts(report(), seen())
    assert made is not None
    assert [span.phase for span in made.phases] == ["ramp", "steady", "drain"]
    assert made.phases[-1].end == pytest.approx(made.seconds)
    bar = phases(made, width=60, script=UNICODE).plain
    assert len(bar) == 60
    assert "steady" in bar
    assert set(made.marks) == {61, 121, 180}
    axis = plot(made.figures[0], made, width=60, height=3, script=UNICODE)[-1].plain
    assert "▲" in axis
    assert "5 min" in axis
    assert sorted(made.marks.values())[0] == pytest.approx(120, abs=5)
    assert made.begin == BEGAN


def test_a_rank_without_a_clock_has_no_place_beside_one_with_dates() -> None:
    observed = seen(ranks=2)
    for index, moment in enumerate(observed.ranks[1].moments):
        moment.at = float(index)
    made = charts(report(), observed)
    assert made is not None
    assert set(made.figures[0].lines) == {"DP0 TP0"}
    assert made.seconds == 720


def test_too_little_to_draw() -> None:
    nothing = Observations([Source("x", "log")], Facts(), [Rank("", [Moment(at=1.0)])])
    assert charts(report(), nothing) is None


def test_a_source_without_times_says_so() -> None:
    observed = seen()
    observed.sources[0].clock = "none"
    made = charts(report(), observed)
    assert made is not None
    assert made.clock == "The log has no timestamps: the axis shows the order of its lines."


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e10),
            st.none() | st.floats(-5, 5),
            st.none() | st.floats(),
            st.integers(0, 3),
        ),
        min_size=2,
        max_size=30,
    ),
    st.integers(20, 60),
    st.integers(1, 6),
)
def test_any_moments_can_be_drawn(
    values: list[tuple[float, float | None, float | None, int]], width: int, height: int
) -> None:
    moments = [
        Moment(at=at, usage=usage, queue=queue, retractions=count)
        for at, usage, queue, count in sorted(values, key=lambda value: value[0])
    ]
    observed = Observations([Source("x", "log")], Facts(), [Rank("", moments)])
    made = charts(report(), observed)
    for figure in made.figures if made else ():
        for script in (ASCII, UNICODE):
            lines = plot(figure, made, width=width, height=height, script=script)  # type: ignore[arg-type]
            assert len(lines) == height + 2
            assert all(len(line.plain) <= max(width, len(figure.title)) for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (60, "1 min"), (90, "1 min 30 s"), (720, "12 min"), (12_000, "3 h 20 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
