"""Reads a folder of logs: of one server (files of its ranks, rotated files, or both) or of
several."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Evidence, Facts, Observations, Rank
from setpoint.doctor.readers.log.reader import read_log
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
    lines, or else by the file. Raises SourceError if no file is a log."""
    parts: list[tuple[str, Observations]] = []
    left_out: list[str] = []
    for path in sorted(Path(name).iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        try:
            parts += [(path.name, seen) for seen in read_log(str(path))]
        except SourceError:
            left_out.append(path.name)
    if not parts:
        raise SourceError(
            f"{name} is a folder without a log of SGLang or Setpoint ({len(left_out)} other files)."
        )
    servers = [
        _one([(file, _with_source(file, part)) for file, part in group])
        for group in _by_server(parts)
    ]
    if left_out:
        shown = ", ".join(left_out[:5]) + ("…" if len(left_out) > 5 else "")
        servers[0].sources[0].notes.append(
            f"{len(left_out)} files are not logs of a server: {shown}."
        )
    if len(servers) > 1:
        for seen in servers:
            seen.sources[0].notes.append(
                f"The folder has logs of {len(servers)} servers, which are diagnosed one by one."
            )
    return servers


Part = tuple[str, Observations]


def _by_server(parts: list[Part]) -> list[list[Part]]:
    groups: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (_begins(part[1]), part[0])):
        for group in groups:
            if not any(_differ(part[1], other) for _, other in group) and _is_near(part, group):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _differ(one: Observations, other: Observations) -> bool:
    """Whether two logs contradict each other, so that they are not of one server."""
    for name in _IDENTITY:
        values = one.facts.options.get(name), other.facts.options.get(name)
        if None not in values and values[0] != values[1]:
            return True
    models = one.facts.model, other.facts.model
    if None not in models and models[0] != models[1]:
        return True
    if one.sources[0].generation.split()[0] != other.sources[0].generation.split()[0]:
        return True
    pools = [pool for seen in (one, other) if (pool := _pool(seen)) is not None]
    return len(pools) == 2 and max(pools) > _SAME_POOL * min(pools)


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


def _is_near(part: Part, group: list[Part]) -> bool:
    """Whether the times of the part are from the same clock as those of a group, and not days after
    them."""
    begin = _begins(part[1])
    if not any(rank.moments for rank in part[1].ranks):
        return True
    ends = [rank.moments[-1].at for _, seen in group for rank in seen.ranks if rank.moments]
    return not ends or begin - max(ends) <= _APART_DAY_S


def _with_source(file: str, seen: Observations) -> Observations:
    facts = seen.facts
    facts.said = {
        name: Evidence(said.line, said.text, said.source or file)
        for name, said in facts.said.items()
    }
    return seen


def _begins(seen: Observations) -> float:
    return min((rank.moments[0].at for rank in seen.ranks if rank.moments), default=0.0)


def _one(parts: list[tuple[str, Observations]]) -> Observations:
    parts.sort(key=lambda part: (_begins(part[1]), part[0]))
    ranks: dict[str, Rank] = {}
    files: dict[str, str] = {}
    for file, seen in parts:
        for rank in seen.ranks:
            name = rank.name
            before = ranks.get(name)
            if before is not None and _follows(rank, before):
                restarted = "model_path" in seen.facts.options
                ranks[name] = rank if restarted else _joined(before, rank)
                continue
            if before is not None:
                # Each file has a rank of this name: the file's name tells them apart.
                if name in files:
                    ranks[_named(files.pop(name), name)] = ranks.pop(name)
                name = _named(file, name)
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


def _named(file: str, rank: str) -> str:
    stem = file.split(".")[0]
    return f"{stem} {rank}".strip()


def _follows(rank: Rank, before: Rank) -> bool:
    if not (rank.moments and before.moments):
        return False
    return rank.moments[0].at >= before.moments[-1].at - _APART_S


def _joined(first: Rank, second: Rank) -> Rank:
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
        for field in dataclasses.fields(Facts):
            if getattr(best, field.name) in (None, [], {}):
                setattr(best, field.name, getattr(other, field.name))
        best.said = {**other.said, **best.said}
    return best
