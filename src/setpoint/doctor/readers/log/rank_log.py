"""The part of a log that one scheduler wrote: its times, its moments, its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from setpoint.doctor.observations import Event, EventKind, Rank
from setpoint.doctor.readers.log.rows_to_moments import moments
from setpoint.doctor.readers.log.table import Column, Table
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
        self, table: Table, text: Callable[[int], str], first: int, *, interval: int
    ) -> Column:
        """Add the next lines; returns their times. first: the number of the block's first line;
        interval: decode steps that a decode line stands for."""
        at = self._times(table, interval)
        columns = table.columns
        self.num_batches += int(np.nansum(columns["is_prefill"]) + np.nansum(columns["is_decode"]))
        start = 0
        while start < len(table):
            stride, room = self._timeline.stride, self._timeline.room
            end = min(start + room + stride * max(self._timeline.free - 1, 0), len(table))
            piece = table.rows(start, end)
            cuts = np.append(0, np.arange(room, end - start, stride))
            until = at[end] if end < len(table) else float("nan")
            found = moments(piece, cuts, at[start:end], until, text, first)
            sizes = np.diff(np.append(cuts, end - start)).tolist()
            for moment, size in zip(found, sizes, strict=True):
                self._timeline.add(moment, size)
            start = end
        if len(at):
            self.last_at = float(at[-1])
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

    def _times(self, table: Table, interval: int) -> Column:
        known = ~np.isnan(table.at)
        if not known.any():
            if self.is_stamped:
                return np.full(len(table), self.last_at)
            return self._estimated(table, interval)
        if known.all():
            at = table.at
        else:  # lines without a stamp: as the one before
            previous = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
            before = self._last_raw if self.is_stamped else table.at[known][0]
            at = np.where(previous >= 0, table.at[previous], before)
        return self._repaired(at)

    def _repaired(self, at: Column) -> Column:
        """The times without going back: what the clock lost is added to all later times."""
        before = self._last_raw if self.is_stamped else at[0]
        steps = np.diff(np.append(before, at))
        lost = np.where(steps < -BACK_S, -steps, 0.0)
        midnights = (lost > _DAY_S / 2) & (at < _DAY_S)  # stamps without a date
        lost[midnights] = _DAY_S
        self.times_back += int(np.count_nonzero((lost > 0) & ~midnights))
        shifted = at + self.shift + np.cumsum(lost)
        self.shift += float(lost.sum())
        self._last_raw = float(at[-1])
        if self.is_stamped:
            shifted[0] = max(shifted[0], self.last_at)
        self.is_stamped = True
        return np.maximum.accumulate(shifted)

    def _estimated(self, table: Table, interval: int) -> Column:
        """Estimated times of lines without timestamps. A decode line says how many tokens were
        generated per second since the one before, a prefill line the same for prompts; each sum is
        the time since the first line."""
        zeros = np.zeros(len(table))
        columns = table.columns
        decode = (
            interval * columns.get("running", zeros) / columns.get("gen_throughput", zeros * np.nan)
        )
        prefill = columns.get("new_tokens", zeros) / columns.get("input_throughput", zeros * np.nan)
        decode, prefill = (np.where(np.isfinite(each), each, 0.0) for each in (decode, prefill))
        if not (decode.any() or prefill.any()):  # nothing but the order
            decode = zeros if self.is_estimated else zeros + 1.0
        else:
            self.is_estimated = True
        decode, prefill = self._decode_s + np.cumsum(decode), self._prefill_s + np.cumsum(prefill)
        self._decode_s, self._prefill_s = float(decode[-1]), float(prefill[-1])
        return np.maximum(decode, prefill)
