"""A folder of logs of one server: files of ranks, rotated files, or both."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from setpoint.core.errors import SourceError
from setpoint.doctor.observations import Evidence, Facts, Observations, Rank
from setpoint.doctor.readers.log.reader import read_log
from setpoint.doctor.timeline import Timeline

_APART_S = 5.0
"""Two files whose times overlap by no more than this are parts of one log."""


def read_folder(name: str) -> Observations:
    """All logs of a folder as one server. Files of the same rank whose times follow one another are
    one log (it was rotated); files that overlap are of different ranks, named as in their lines,
    or else by the file. Raises SourceError if no file is a log."""
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
    seen = _one([(file, _with_source(file, part)) for file, part in parts])
    if left_out:
        shown = ", ".join(left_out[:5]) + ("…" if len(left_out) > 5 else "")
        seen.sources[0].notes.append(f"{len(left_out)} files are no logs of a server: {shown}.")
    return seen


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
    )


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
    """Those of the part that says most, completed by the others."""
    ordered = sorted(found, key=lambda facts: len(facts.said), reverse=True)
    best = ordered[0]
    for other in ordered[1:]:
        for field in dataclasses.fields(Facts):
            if getattr(best, field.name) in (None, [], {}):
                setattr(best, field.name, getattr(other, field.name))
        best.said = {**other.said, **best.said}
    return best
