"""The last minutes of sources that still grow: servers, which are polled, and logs, whose beginning
and end are read again when they have grown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from setpoint.doctor.observations import Observations, Rank
from setpoint.doctor.readers.kinds import is_recording, is_saved
from setpoint.doctor.readers.log.reader import read_chunks
from setpoint.doctor.readers.log.stream import is_packed
from setpoint.doctor.readers.sources import observe_sources

WINDOW_S = 300.0
"""Seconds that a verdict is about: an earlier limit has gone, or will come back."""
_HEAD, _TAIL = 1 << 20, 8 << 20
"""Bytes of a log that are read: the head has the server's limits, the tail the last minutes."""


class Watched:
    """Sources whose last minutes are read again and again."""

    def __init__(self, names: Sequence[str], *, api_key: str | None = None) -> None:
        self._names = names
        self._api_key = api_key
        self._servers: dict[str, Observations] = {}

    def look(self, *, seconds: float) -> list[Observations]:
        """The observations of the last WINDOW_S of each source. seconds: how long to watch a URL.
        Raises SourceError for a source that cannot be read."""
        return [
            recent(seen, WINDOW_S) for name in self._names for seen in self._look(name, seconds)
        ]

    def _look(self, name: str, seconds: float) -> list[Observations]:
        if "://" in name:
            before = self._servers.get(name)
            past_s = 0.0 if before else WINDOW_S
            (seen,) = observe_sources([name], seconds=seconds, past_s=past_s, api_key=self._api_key)
            self._servers[name] = recent(
                join_observations(before, seen) if before else seen, WINDOW_S
            )
            return [self._servers[name]]
        if _is_large(Path(name)):
            return _ends_of(name)
        return observe_sources([name], seconds=seconds)


def join_observations(before: Observations, after: Observations) -> Observations:
    """Two observations of a server as one. The later may begin with the last moment of the earlier
    one."""
    begins = [moment.at for rank in after.ranks for moment in rank.moments]
    end = min(begins, default=float("inf"))
    earlier = {rank.name: _within(rank, end=end) for rank in before.ranks}
    ranks = [
        Rank(
            rank.name,
            [*old.moments, *rank.moments],
            [*old.events, *rank.events],
            {
                kind: old.num_events.get(kind, 0) + rank.num_events.get(kind, 0)
                for kind in {**old.num_events, **rank.num_events}
            },
        )
        for rank in after.ranks
        for old in [earlier.get(rank.name, Rank(rank.name))]
    ]
    return replace(after, ranks=ranks)


def recent(seen: Observations, seconds: float) -> Observations:
    """The last ``seconds`` of the observations. Events without a time stay, and so do the facts
    that the server stated at its start."""
    ends = [moment.at + moment.seconds for rank in seen.ranks for moment in rank.moments]
    if not ends:
        return seen
    begin = max(ends) - seconds
    return replace(seen, ranks=[_within(rank, begin=begin) for rank in seen.ranks])


def _within(rank: Rank, *, begin: float = float("-inf"), end: float = float("inf")) -> Rank:
    """The part of a rank that began in this time, with events without a time."""
    events = [event for event in rank.events if event.at is None or begin <= event.at < end]
    gone = [event.kind for event in rank.events if event not in events]
    counts = {kind: count - gone.count(kind) for kind, count in rank.num_events.items()}
    moments = [moment for moment in rank.moments if begin <= moment.at < end]
    return Rank(rank.name, moments, events, counts)


def _is_large(path: Path) -> bool:
    """Whether a file is a large log that is not packed, so that its ends are enough."""
    if not path.is_file() or path.stat().st_size <= _HEAD + _TAIL:
        return False
    return not (is_packed(path) or is_recording(path) or is_saved(path))


def _ends_of(name: str) -> list[Observations]:
    """The observations of a large log without its middle, with the right line numbers."""
    with Path(name).open("rb") as file:
        head = file.read(_HEAD)
        head = head[: head.rfind(b"\n") + 1]
        skipped = _lines_until(file, len(head), file.seek(-_TAIL, 2))
        tail = file.read()
    tail, cut = tail[tail.find(b"\n") + 1 :], 1
    found = read_chunks(name, [head, tail])
    for seen in found:
        _renumber(seen, head.count(b"\n"), skipped + cut)
    return found


def _lines_until(file: BinaryIO, begin: int, end: int) -> int:
    """The number of line ends between two places of a file, which is left at the second."""
    file.seek(begin)
    count = sum(block.count(b"\n") for block in _blocks(file, end - begin))
    file.seek(end)
    return count


def _blocks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        yield block
        size -= len(block)


def _renumber(seen: Observations, after: int, by: int) -> None:
    """Add ``by`` to the numbers of all lines after line ``after``."""
    for rank in seen.ranks:
        for moment in rank.moments:
            moment.line += by if moment.line > after else 0
        for event in rank.events:
            event.line += by if event.line > after else 0
    for name, said in seen.facts.said.items():
        if said.line > after:
            seen.facts.said[name] = replace(said, line=said.line + by)
