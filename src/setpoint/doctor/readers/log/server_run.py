"""One run of one server, from its start in the log to its end, or to the end of the log."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from setpoint.doctor.observations import Event, Facts, Rank
from setpoint.doctor.readers.log.rank_log import RankLog

_GROUP = re.compile(r"DP\d+|PP\d+")
FATAL = ("oom", "watchdog", "killed", "traceback")


@dataclass(slots=True)
class ServerRun:
    first_line: int
    facts: Facts = field(default_factory=Facts)
    ranks: dict[str, RankLog] = field(default_factory=dict)
    has_options: bool = False
    is_ready: bool = False
    """Whether it has said that it is ready, or has run batches."""
    ready_line: float = math.inf
    ended: bool = False
    last_kind: str = ""
    """The kind of the last batch: "prefill" or "decode"."""
    num_before_ready: int = 0
    """Number of batch lines between its options and its ready line, which are another server's."""
    engine_deaths: list[int] = field(default_factory=list)
    """The lines that say that one of the server's engines died."""
    models: tuple[str, ...] = ()
    """The names of the models, if the server has several; each of them logs its options."""
    styles: set[str] = field(default_factory=set)
    """Marks of the log's generation."""

    def rank(self, name: str) -> RankLog:
        if name not in self.ranks:
            self.ranks[name] = RankLog(name)
        return self.ranks[name]

    @property
    def num_batches(self) -> int:
        return sum(rank.num_batches for rank in self.ranks.values())

    @property
    def has_begun(self) -> bool:
        """Whether it shows more than its options and the first steps of its start."""
        return self.is_ready or self.num_batches > 0 or bool(self.fatal_events())

    def fatal_events(self) -> list[Event]:
        events = [event for rank in self.ranks.values() for event in rank.events]
        return [event for event in events if event.kind in FATAL]

    @property
    def last_at(self) -> float | None:
        """Time of the last batch line."""
        return max((rank.last_at for rank in self.ranks.values() if rank.num_batches), default=None)

    @property
    def shift(self) -> float:
        return max((rank.shift for rank in self.ranks.values()), default=0.0)

    @property
    def interval(self) -> int:
        asked = self.facts.options.get("decode_log_interval")
        return asked if isinstance(asked, int) and asked > 0 else 40

    def finished_ranks(self) -> list[Rank]:
        """The schedulers. In a tensor-parallel group only the first rank reports batches, but each
        warns of the same retraction: what the others say counts only if the first says nothing."""
        groups: dict[str, list[RankLog]] = {}
        for rank in self.ranks.values():
            groups.setdefault(" ".join(_GROUP.findall(rank.name)), []).append(rank)
        frontend = self.ranks.get("")
        ranks = []
        for group in groups.values():
            speaking = [rank for rank in group if rank.num_batches]
            if not speaking and (group == [frontend] and len(self.ranks) > 1):
                continue  # the parent process: its events are given to the first scheduler
            leaders = speaking or [max(group, key=lambda rank: sum(rank.num_events.values()))]
            for rank in group:
                if rank not in leaders and rank is not frontend:
                    _fold(leaders[0], rank)
            ranks += leaders
        if frontend is not None and frontend not in ranks and ranks:
            ranks[0].add_events(frontend)
        return [rank.rank() for rank in ranks]


def _fold(leader: RankLog, other: RankLog) -> None:
    """Give a leader the events of the kinds that it does not report itself."""
    for kind, count in other.num_events.items():
        if count > leader.num_events.get(kind, 0):
            leader.replace_events(kind, other)
