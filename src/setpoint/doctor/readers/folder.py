"""Reads a folder of logs: of one server (files of its ranks, rotated files, or both) or of
several."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Evidence, Facts, Observations, Rank
from setpoint.doctor.readers.log.budget import Budget
from setpoint.doctor.readers.log.reader import MAX_SERVERS, read_log
from setpoint.doctor.timeline import Timeline

_APART_S = 5.0
"""Two files whose times overlap by no more than this are parts of one log."""
_APART_DAY_S = 86400.0
"""If a server wrote nothing for longer, or its clock counts from another time, the later lines
count as another server's."""
_IDENTITY = ("model_path", "served_model_name", "port", "tp_size", "dp_size", "mem_fraction_static")
"""Options that are the same in all logs of one server."""
_SAME_POOL = 1.25
_CLEAR_USAGE = 0.2
"""Usage has two decimals: below this value it does not show the size of the pool well enough."""


def read_folder(name: str) -> list[Observations]:
    """The observations of the servers whose logs are in a folder, usually one. Files that
    contradict each other (in the model, the options, the size of the pool, or the times) belong to
    different servers. Files of one server and rank whose times follow one another are one log,
    which was rotated. Files that overlap belong to different ranks, which are named as in their
    lines, or else by the file. All files together may take no longer than one log of their size.
    Raises SourceError if no file is a log."""
    read = _read_all(name)
    if not read.parts:
        has = _count([*read.no_logs, *read.not_read])
        raise SourceError(
            f"{name} is a folder without a log of SGLang or Setpoint (it has {has})."
            f"{_subfolders(read.folders)}"
        )
    groups = _by_server(read.parts)
    servers = [
        _merge([(file, _with_source(file, part)) for file, part in group])
        for group in groups[:MAX_SERVERS]
    ]
    notes = servers[0].sources[0].notes
    if read.no_logs:
        files = _count(read.no_logs)
        notes.append(f"Left out, without a line of a server: {files} ({_some(read.no_logs)}).")
    if read.folders:
        notes.append(_subfolders(read.folders).strip())
    if read.not_read:
        notes.append(
            f"Not read: {_count(read.not_read)} ({_some(read.not_read)}). The files before "
            "them are made of lines that take far longer to read than those of a server."
        )
    if len(groups) > MAX_SERVERS:
        notes.append(
            f"The folder has logs of {len(groups)} servers; only the first {MAX_SERVERS} are "
            "diagnosed."
        )
    if len(servers) > 1:
        for seen in servers:
            seen.sources[0].notes.append(
                f"The folder has logs of {len(servers)} servers, which are diagnosed one by one."
            )
    return servers


Part = tuple[str, Observations]


@dataclass(slots=True)
class _Read:
    parts: list[Part] = field(default_factory=list)
    no_logs: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    """Files for which no time was left."""
    folders: list[str] = field(default_factory=list)


def _read_all(folder: str) -> _Read:
    read, budget = _Read(), Budget()
    for path in sorted(Path(folder).iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            read.folders.append(path.name)
        if not path.is_file():
            continue
        if budget.is_spent:
            read.not_read.append(path.name)
            continue
        try:
            read.parts += [(path.name, seen) for seen in read_log(str(path), budget)]
        except SourceError:
            read.no_logs.append(path.name)
    return read


def _subfolders(folders: list[str]) -> str:
    return f" Subfolders are not read; name one: {_some(folders)}." if folders else ""


def _count(files: list[str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"


def _some(files: list[str]) -> str:
    return ", ".join(files[:5]) + ("…" if len(files) > 5 else "")


def _by_server(parts: list[Part]) -> list[list[Part]]:
    groups: list[tuple[_Known, list[Part]]] = []
    for part in sorted(parts, key=lambda part: (_begins(part[1]), part[0])):
        known = _Known.of(part[1])
        for about, group in groups:
            if about.agrees(known):
                about.add(known)
                group.append(part)
                break
        else:
            groups.append((known, [part]))
    return [group for _, group in groups]


@dataclass(slots=True)
class _Known:
    """What logs say of the server that wrote them, as far as it cannot be otherwise."""

    named: dict[str, Any]
    """The options, the model and the program, by name."""
    pools: tuple[float, float] | None
    """The smallest and the largest size of the KV pool."""
    ends: float | None
    """Time of the last batch."""
    begins: float | None

    @classmethod
    def of(cls, seen: Observations) -> _Known:
        named = {name: seen.facts.options.get(name) for name in _IDENTITY}
        named |= {"": seen.facts.model, "program": seen.sources[0].generation.split()[0]}
        pool = _pool(seen)
        moments = [rank.moments for rank in seen.ranks if rank.moments]
        return cls(
            {name: value for name, value in named.items() if value is not None},
            None if pool is None else (pool, pool),
            max((each[-1].at for each in moments), default=None),
            min((each[0].at for each in moments), default=None),
        )

    def agrees(self, other: _Known) -> bool:
        """Whether one server may have written both, and one not days after the other."""
        named = self.named
        if any(named.get(name, value) != value for name, value in other.named.items()):
            return False
        if self.pools and other.pools:
            sizes = (*self.pools, *other.pools)
            if max(sizes) > _SAME_POOL * min(sizes):
                return False
        if self.ends is None or other.begins is None:
            return True
        return other.begins - self.ends <= _APART_DAY_S

    def add(self, other: _Known) -> None:
        self.named |= other.named
        sizes = (*(self.pools or ()), *(other.pools or ()))
        self.pools = (min(sizes), max(sizes)) if sizes else None
        ends = [each for each in (self.ends, other.ends) if each is not None]
        self.ends = max(ends, default=None)


def _pool(seen: Observations) -> float | None:
    """The tokens of the KV pool, as the start says or the lines about batches show."""
    if seen.facts.max_total_num_tokens:
        return float(seen.facts.max_total_num_tokens)
    sizes = [
        moment.tokens / moment.usage
        for rank in seen.ranks
        for moment in rank.moments
        if moment.num_decode and moment.tokens and moment.usage is not None
        if moment.usage >= _CLEAR_USAGE
    ]
    return statistics.median(sizes) if sizes else None


def _with_source(file: str, seen: Observations) -> Observations:
    facts = seen.facts
    facts.said = {
        name: Evidence(said.line, said.text, said.source or file)
        for name, said in facts.said.items()
    }
    return seen


def _begins(seen: Observations) -> float:
    return min((rank.moments[0].at for rank in seen.ranks if rank.moments), default=0.0)


def _merge(parts: list[tuple[str, Observations]]) -> Observations:
    parts.sort(key=lambda part: (_begins(part[1]), part[0]))
    ranks: dict[str, Rank] = {}
    files: dict[str, str] = {}
    for file, seen in parts:
        for rank in seen.ranks:
            name = rank.name
            before = ranks.get(name)
            if before is not None and _follows(rank, before):
                restarted = "model_path" in seen.facts.options
                ranks[name] = rank if restarted else _join_ranks(before, rank)
                continue
            if before is not None:
                # Each file has a rank of this name: the file's name tells them apart.
                if name in files:
                    ranks[_rank_name(files.pop(name), name)] = ranks.pop(name)
                name = _rank_name(file, name)
            else:
                files[name] = file
            ranks[name] = rank
            rank.name = name
    for name, rank in ranks.items():
        rank.name = name
    return Observations(
        sources=[source for _, seen in parts for source in seen.sources],
        facts=_facts([seen.facts for _, seen in parts]),
        ranks=[ranks[name] for name in sorted(ranks)],
        ended=any(seen.ended for _, seen in parts),
        files=_files(parts) if len(parts) > 1 else {},
        silence=parts[0][1].silence if len(parts) == 1 else None,
    )


def _files(parts: list[Part]) -> dict[tuple[int, str], str]:
    """(number, text) of each quoted line -> its file."""
    found: dict[tuple[int, str], str] = {}
    for file, seen in parts:
        for rank in seen.ranks:
            found |= {(moment.line, moment.text): file for moment in rank.moments}
            found |= {(event.line, event.text): file for event in rank.events}
    return found


def _rank_name(file: str, rank: str) -> str:
    stem = file.split(".")[0]
    return f"{stem} {rank}".strip()


def _follows(rank: Rank, before: Rank) -> bool:
    if not (rank.moments and before.moments):
        return False
    return rank.moments[0].at >= before.moments[-1].at - _APART_S


def _join_ranks(first: Rank, second: Rank) -> Rank:
    timeline = Timeline()
    for moment in [*first.moments, *second.moments]:
        timeline.add(moment)
    kinds = {*first.num_events, *second.num_events}
    return Rank(
        first.name,
        timeline.moments(),
        first.events + second.events,
        {kind: first.num_events.get(kind, 0) + second.num_events.get(kind, 0) for kind in kinds},
    )


def _facts(found: list[Facts]) -> Facts:
    """The facts of the part that says most, completed by the others."""
    ordered = sorted(found, key=lambda facts: len(facts.said), reverse=True)
    best = ordered[0]
    for other in ordered[1:]:
        for each in dataclasses.fields(Facts):
            if getattr(best, each.name) in (None, [], {}):
                setattr(best, each.name, getattr(other, each.name))
        best.said = {**other.said, **best.said}
    return best
