"""Makes the charts of a report: figures over time, for the terminal and for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from setpoint.core.moments import Moment
from setpoint.doctor.findings import PhaseSpan, Report
from setpoint.doctor.observations import Observations
from setpoint.doctor.phases import running_of

Points = list[tuple[float, float]]
"""(seconds since the chart's beginning, value), in the order of time."""


class Reading(NamedTuple):
    """The value of a figure from ``begin`` to ``end``, in seconds since the chart's beginning. The
    two are equal for a line of a log, which does not say how long its moment lasted."""

    begin: float
    end: float
    value: float

    @property
    def at(self) -> float:
        return (self.begin + self.end) / 2


_STEPS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
"""Values at which an axis may end, times a power of ten."""
_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
_DAY_S = 86400
_DATES = 1e8
"""Times above this are seconds since 1970, not since the first line of a log."""
_SILENCE = 12.0
"""Lines of a log this many times further apart than usual are not connected: nothing ran in
between."""


@dataclass(slots=True, frozen=True)
class Figure:
    """One chart. It has a line for each rank that has the figure."""

    title: str
    unit: str
    lines: dict[str, list[Reading]]
    """The readings of each rank, by its name, in the order of time."""
    top: float
    """Where the axis of values ends; it begins at 0."""
    limit: float | None = None
    """A value that the figure cannot exceed. It may be far above the top."""
    limit_name: str = ""
    bars: bool = False
    """Whether the values are counts, which are drawn as bars and not connected."""

    @property
    def drawn_limit(self) -> float | None:
        """The limit, if it is in the chart."""
        return self.limit if self.limit is not None and self.limit <= self.top else None


@dataclass(slots=True, frozen=True)
class Charts:
    """The charts of one report over the same time."""

    begin: float
    """When the charts begin, by the clock of the source."""
    seconds: float
    figures: list[Figure]
    """First the four with which every report begins, as far as the source has them, then the
    others."""
    phases: list[PhaseSpan] = field(default_factory=list)
    """The phases, in seconds since the beginning, in the order of time."""
    marks: dict[int, float] = field(default_factory=dict)
    """Number of a line that is evidence of the first finding -> seconds since the beginning."""
    clock: str = ""
    """What the reader must know about the axis of time; "" if it shows real times."""

    def place(self, at: float) -> float:
        """Where a time of the source is between the ends of the charts, 0 to 1."""
        return min(max((at - self.begin) / self.seconds, 0.0), 1.0)

    def typical(self, figure: Figure) -> tuple[float, float]:
        """Median and largest value, in the steady phases if there are any."""
        steady = [span for span in self.phases if span.phase == "steady"]
        readings = [reading for line in figure.lines.values() for reading in line]
        inside = [
            reading.value
            for reading in readings
            if any(span.start <= reading.at <= span.end for span in steady)
        ]
        values = inside or [reading.value for reading in readings]
        return median(values), max(values)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, label) of about four times."""
        step = next(
            (step for step in _TIME_STEPS if self.seconds / step <= 5),
            _DAY_S * max(1, round(self.seconds / _DAY_S / 4)),
        )
        count = int(self.seconds / step + 1e-9)
        return [(index * step / self.seconds, duration(index * step)) for index in range(count + 1)]


def charts(report: Report, seen: Observations) -> Charts | None:
    """The charts of a report; None if there are not at least two moments to draw."""
    times = [
        time
        for rank in seen.ranks
        for moment in rank.moments
        for time in (moment.at, moment.at + moment.seconds)
    ]
    if times and max(times) > _DATES:  # ranks without a clock have no place on this axis
        times = [time for time in times if time > _DATES]
    if len(times) < 4 or max(times) <= min(times):
        return None
    begin, end = min(times), max(times)
    return Charts(
        begin=begin,
        seconds=end - begin,
        figures=_figures(seen, begin),
        phases=_phases(report, begin, end),
        marks=_marks(report, seen, begin),
        clock=_clock(seen),
    )


def _figures(seen: Observations, begin: float) -> list[Figure]:
    facts = seen.facts
    most = facts.max_running_requests
    wanted = [
        _figure(seen, begin, "KV pool in use", "%", lambda m: _times(m.usage, 100), top=100),
        _figure(seen, begin, "Running requests", "", running_of, limit=most, name="limit"),
        _figure(seen, begin, "Waiting requests", "", lambda m: m.queue),
        _figure(seen, begin, "Output throughput", " tok/s", lambda m: m.gen_throughput),
        _figure(seen, begin, "Prefix cache hits", "%", _hits, top=100),
        _figure(seen, begin, "Retracted requests", "", _retracted, bars=True, hidden=_zero),
        _figure(
            seen,
            begin,
            "Time to first token, p95",
            " s",
            lambda m: m.quantiles.get("ttft_p95"),
        ),
        _figure(
            seen,
            begin,
            "Requests waiting for a grammar",
            "",
            lambda m: m.preparing,
            hidden=_zero,
        ),
    ]
    return [figure for figure in wanted if figure is not None]


def _figure(
    seen: Observations,
    begin: float,
    title: str,
    unit: str,
    value: Callable[[Moment], float | None],
    *,
    top: float | None = None,
    limit: float | None = None,
    name: str = "",
    bars: bool = False,
    hidden: Callable[[list[float]], bool] = lambda values: not values,
) -> Figure | None:
    lines: dict[str, list[Reading]] = {}
    for rank in seen.ranks:
        readings = [
            Reading(moment.at - begin, moment.at + moment.seconds - begin, found)
            for moment in rank.moments
            if moment.at >= begin and (found := value(moment)) is not None and math.isfinite(found)
        ]
        if len(readings) > 1:
            lines[rank.name] = readings
    values = [reading.value for readings in lines.values() for reading in readings]
    if not values or hidden(values):
        return None
    largest = max(values)
    return Figure(
        title=title,
        unit=unit,
        lines=lines,
        # A limit far above all values would leave no room for them.
        top=top or _nice(max(largest, limit if limit and limit <= 2 * largest else 0.0)),
        limit=limit,
        limit_name=name,
        bars=bars,
    )


def _zero(values: list[float]) -> bool:
    return not any(values)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _hits(moment: Moment) -> float | None:
    total = moment.cached_tokens + moment.new_tokens
    return 100 * moment.cached_tokens / total if total else None


def _retracted(moment: Moment) -> float | None:
    return float(max(moment.retracted, moment.retractions))


def _nice(value: float) -> float:
    """The next round number."""
    if value <= 1:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(step * power for step in _STEPS if step * power >= value)


def _phases(report: Report, begin: float, end: float) -> list[PhaseSpan]:
    """The phases of the rank with most of them: the ranks differ little, and charts have one
    axis."""
    spans = max(report.phases.values(), key=len, default=[])
    found: list[PhaseSpan] = []
    for span in spans:
        first, last = max(span.start, begin), min(span.end, end)
        if last <= first:
            continue
        if found and found[-1].phase == span.phase:
            found[-1] = PhaseSpan(span.phase, found[-1].start, last - begin)
        else:
            found.append(PhaseSpan(span.phase, first - begin, last - begin))
    return found


def _marks(report: Report, seen: Observations, begin: float) -> dict[int, float]:
    """The marks of the evidence; none if there are several sources, whose lines have the same
    numbers."""
    if not report.findings or len(report.sources) != 1:
        return {}
    lines = {evidence.line for evidence in report.findings[0].evidence if evidence.line}
    return {
        moment.line: moment.at + moment.seconds / 2 - begin
        for rank in seen.ranks
        for moment in rank.moments
        if moment.line in lines
    }


def _clock(seen: Observations) -> str:
    clocks = {source.clock for source in seen.sources}
    if "none" in clocks:
        return "The log has no timestamps: the axis shows the order of its lines."
    if "estimated" in clocks:
        return "The log has no timestamps: times are estimated from its output throughput."
    return ""


def pieces(readings: Sequence[Reading], width: float) -> Iterator[list[Reading]]:
    """Yields runs of readings without a gap in which the figure was unknown. ``width``: seconds
    that are too short to be seen. Most lines of a log stand for an instant, so that only an unusual
    silence means that nothing ran; other sources say what each reading covers."""
    holes = [after.begin - before.end for before, after in pairwise(readings)]
    longest = width
    if 2 * sum(reading.end > reading.begin for reading in readings) < len(readings):
        usual = sorted(holes)[len(holes) // 2] if holes else 0.0
        longest = _SILENCE * max(usual, width)
    piece = list(readings[:1])
    for hole, reading in zip(holes, readings[1:], strict=True):
        if hole > longest:
            yield piece
            piece = []
        piece.append(reading)
    if piece:
        yield piece


def vertices(piece: Sequence[Reading], width: float) -> Points:
    """The corners of a line through the readings. A reading that lasts for several columns, each of
    ``width`` seconds, is level, without the columns that it shares with its neighbours."""
    corners: Points = []
    for begin, end, value in piece:
        if end - begin > 2 * width:
            corners += [(begin + width, value), (end - width, value)]
        else:
            corners.append(((begin + end) / 2, value))
    return corners


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h" + (f" {minutes} min" if minutes else "")
