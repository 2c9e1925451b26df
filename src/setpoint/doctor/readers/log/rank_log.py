"""The part of a log that one scheduler wrote: its times, its moments, its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate, pairwise
from math import isfinite

from setpoint.doctor.observations import Event, EventKind, Rank
from setpoint.doctor.readers.log.rows_to_moments import moments
from setpoint.doctor.readers.log.table import BatchTable, Column
from setpoint.doctor.timeline import Timeline

KEPT_EVENTS = 64
BACK_S = 2.0
"""Lines of several processes may be out of order by so many seconds."""
_DAY_S = 86400.0


class RankLog:
    def __init__(self, name: str) -> None:
        self.name = name
        self._events: dict[EventKind, tuple[list[Event], deque[Event]]] = {}
        self.num_events: dict[EventKind, int] = {}
        self.num_batches = 0
        self.times_back = 0
        """How often the clock went back."""
        self.is_stamped = False
        self.is_estimated = False
        self.last_at = 0.0
        self._last_raw = float("nan")
        self.shift = 0.0
        """The seconds that are added to each timestamp, because the clock went back."""
        self._decode_s = self._prefill_s = 0.0
        self._timeline = Timeline()

    def take(
        self, table: BatchTable, text: Callable[[int], str], first: int, *, interval: int
    ) -> Column:
        """Add the next lines; returns their times. first: the number of the block's first line;
        interval: decode steps that a decode line stands for."""
        at = self._times(table, interval)
        columns = table.columns
        self.num_batches += int(sum(columns["is_prefill"]) + sum(columns["is_decode"]))
        start = 0
        while start < len(table):
            stride, room = self._timeline.stride, self._timeline.room
            end = min(start + room + stride * max(self._timeline.free - 1, 0), len(table))
            piece = table.rows(start, end)
            cuts = [0, *range(room, end - start, stride)]
            until = at[end] if end < len(table) else float("nan")
            found = moments(piece, cuts, at[start:end], until, text, first)
            sizes = [later - cut for cut, later in pairwise([*cuts, end - start])]
            for moment, size in zip(found, sizes, strict=True):
                self._timeline.add(moment, size)
            start = end
        if at:
            self.last_at = at[-1]
        return at

    def happened(self, event: Event) -> None:
        kept = self._events.setdefault(event.kind, ([], deque(maxlen=KEPT_EVENTS // 2)))
        first, latest = kept
        if len(first) < KEPT_EVENTS // 2:
            first.append(event)
        else:  # how a server ended is at the end
            latest.append(event)
        self.num_events[event.kind] = self.num_events.get(event.kind, 0) + 1

    @property
    def events(self) -> list[Event]:
        """The events that are kept, in the order of the lines: the first and the last of each
        kind."""
        kept = (event for first, latest in self._events.values() for event in (*first, *latest))
        return sorted(kept, key=lambda event: event.line)

    def replace_events(self, kind: EventKind, other: RankLog) -> None:
        """Take the events of this kind from another rank."""
        self._events[kind] = other._events[kind]
        self.num_events[kind] = other.num_events[kind]

    def add_events(self, other: RankLog) -> None:
        """Take all events of another rank as well."""
        counts = {
            kind: self.num_events.get(kind, 0) + count for kind, count in other.num_events.items()
        }
        for event in other.events:
            self.happened(event)
        self.num_events |= counts

    def rank(self) -> Rank:
        return Rank(
            name=self.name,
            moments=self._timeline.moments(),
            events=self.events,
            num_events=dict(self.num_events),
        )

    def _times(self, table: BatchTable, interval: int) -> Column:
        first = next((at for at in table.at if at == at), None)
        if first is None:
            if self.is_stamped:
                return [self.last_at] * len(table)
            return self._estimated(table, interval)
        last = self._last_raw if self.is_stamped else first
        at = []
        for each in table.at:
            if each == each:  # lines without a stamp: as the one before
                last = each
            at.append(last)
        return self._repaired(at)

    def _repaired(self, at: Column) -> Column:
        """The times without going back: what the clock lost is added to all later times."""
        before = self._last_raw if self.is_stamped else at[0]
        latest = self.last_at if self.is_stamped else at[0] + self.shift
        repaired = []
        for each in at:
            if each - before < -BACK_S:
                if before - each > _DAY_S / 2 and each < _DAY_S:  # stamps without a date
                    self.shift += _DAY_S
                else:
                    self.shift += before - each
                    self.times_back += 1
            before = each
            latest = max(latest, each + self.shift)
            repaired.append(latest)
        self._last_raw = before
        self.is_stamped = True
        return repaired

    def _estimated(self, table: BatchTable, interval: int) -> Column:
        """Estimated times of lines without timestamps. A decode line says how many tokens were
        generated per second since the one before, a prefill line the same for prompts; each sum is
        the time since the first line."""
        decode = _ratios(table, "running", "gen_throughput", interval)
        prefill = _ratios(table, "new_tokens", "input_throughput", 1)
        if not (any(decode) or any(prefill)):  # nothing but the order
            decode = [0.0 if self.is_estimated else 1.0] * len(table)
        else:
            self.is_estimated = True
        decodes = list(accumulate(decode, initial=self._decode_s))[1:]
        prefills = list(accumulate(prefill, initial=self._prefill_s))[1:]
        self._decode_s, self._prefill_s = decodes[-1], prefills[-1]
        return list(map(max, decodes, prefills))


def _ratios(table: BatchTable, above: str, below: str, factor: int) -> Column:
    """For each line factor * above / below; 0.0 where that is no number."""
    none = [0.0] * len(table)
    tops, bottoms = table.columns.get(above, none), table.columns.get(below, none)
    found = (
        factor * top / bottom if bottom else 0.0 for top, bottom in zip(tops, bottoms, strict=True)
    )
    return [each if isfinite(each) else 0.0 for each in found]
