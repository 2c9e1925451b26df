"""How often the doctor is right about the corpus; ``python tests/unit/doctor_accuracy.py`` writes
the table of docs/doctor.md."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setpoint.core.errors import SourceError
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.findings import Report
from setpoint.doctor.main_report import main_report
from setpoint.doctor.readers.sources import observe_sources

REPOSITORY = Path(__file__).parents[2]
CORPUS = REPOSITORY / "tests" / "doctor_corpus"
DOCUMENT = REPOSITORY / "docs" / "doctor.md"
BEGIN = "<!-- accuracy: written by `python tests/unit/doctor_accuracy.py` -->"
END = "<!-- end of accuracy -->"
SAME_FLAG = {
    "--cuda-graph-max-bs-decode": "--cuda-graph-max-bs",
    "--disable-decode-cuda-graph": "--disable-cuda-graph",
}
"""Newer name -> the one of the labels."""
OPPOSITE = {"increase": "decrease", "decrease": "increase"}
NO_VERDICT = "not-enough-evidence"
PARTS = ("cases", "held_out", "strangers")
"""Folders: cases that rule writers saw; cases held out; logs of somebody who did not know the rules."""
HELD_OUT_SHARE = 0.3
HELD_OUT_SEED = 20261122

Change = tuple[str, str]
"""(flag, direction)."""


@dataclass(slots=True, frozen=True)
class Case:
    name: str
    path: Path
    cause: str
    acceptable: tuple[str, ...]
    actions: tuple[Change, ...]
    """Any of them is right."""
    forbidden: tuple[Change, ...]
    part: str
    """One of ``PARTS``."""


@dataclass(slots=True)
class Judged:
    """A case and what the doctor says about it."""

    case: Case
    verdict: str
    changes: list[Change] = field(default_factory=list)
    """What the findings ask for, the first finding first."""

    @property
    def is_right(self) -> bool:
        return self.verdict == self.case.cause or self.verdict in self.case.acceptable

    @property
    def contradictions(self) -> list[Change]:
        """Changes that would make it worse, and those of which the opposite is advised, too."""
        return [
            (flag, direction)
            for flag, direction in self.changes
            if (flag, direction) in self.case.forbidden
            or (flag, OPPOSITE.get(direction)) in self.changes
        ]

    @property
    def is_false_alarm(self) -> bool:
        return self.case.cause == "healthy" and not self.is_right

    @property
    def is_unfounded(self) -> bool:
        """Whether changes of the server are advised although the source does not say enough."""
        return self.case.cause == NO_VERDICT and not self.is_right and bool(self.changes)

    @property
    def has_action(self) -> bool | None:
        """Whether the first finding asks for the change of the label; None: there is none, or the
        verdict is another one."""
        if not self.case.actions or self.verdict != self.case.cause:
            return None
        return any(change in self.case.actions for change in self.changes[:1])


def cases() -> list[Case]:
    return [_case(path, part) for part in PARTS for path in sorted((CORPUS / part).glob("*.json"))]


def is_held_out(name: str) -> bool:
    """Whether a new case belongs into ``held_out``: its name alone says so, so that nobody can choose
    the cases that a rule is judged by."""
    return random.Random(f"{HELD_OUT_SEED}:{name}").random() < HELD_OUT_SHARE


def _case(path: Path, part: str) -> Case:
    label = json.loads(path.read_text())
    logs = [path.with_suffix(end) for end in (".log", ".log.gz") if path.with_suffix(end).exists()]
    (log,) = logs
    return Case(
        name=path.stem,
        path=log,
        cause=label["cause"],
        acceptable=tuple(label["acceptable"]),
        actions=tuple(map(_change, filter(None, [label["action"], *label["other_actions"]]))),
        forbidden=tuple(map(_change, label["forbidden"])),
        part=part,
    )


def _change(change: dict[str, str]) -> Change:
    return change["flag"], change["direction"]


def report_on(path: Path) -> Report:
    seen = observe_sources([str(path)], seconds=0.0)
    report, _ = main_report([(diagnose(life), life) for life in seen])
    return report


def judge(case: Case) -> Judged:
    """A source that cannot be read is refused with an error, which is as good as no verdict."""
    try:
        report = report_on(case.path)
    except SourceError:
        return Judged(case, NO_VERDICT)
    changes = [
        (SAME_FLAG.get(finding.action.flag, finding.action.flag), finding.action.direction)
        for finding in report.findings
        if finding.action.flag is not None and finding.action.direction is not None
    ]
    return Judged(case, report.verdict, changes)


def judge_all(wanted: Sequence[Case]) -> list[Judged]:
    with ProcessPoolExecutor(max_workers=2) as pool:
        return list(pool.map(judge, wanted, chunksize=8))


def share(judged: Iterable[bool]) -> float:
    found = list(judged)
    return sum(found) / len(found) if found else 1.0


def table(judged: Sequence[Judged]) -> str:
    """A table in Markdown with a row for each cause, and the accuracy on each part of the
    corpus."""
    rows: defaultdict[str, list[Judged]] = defaultdict(list)
    for each in judged:
        rows[each.case.cause].append(each)
    lines = [
        "| cause | cases | right | held out | right | strangers | right | own cause |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(f"`{cause}`", rows[cause]) for cause in sorted(rows)),
        _row("all", judged),
    ]
    facts = [
        _fact("verdicts that are not the label's cause but acceptable", judged, _is_acceptable),
        _fact("changes that contradict one another or would make it worse", judged, _contradicts),
        _fact("false alarms about healthy servers", judged, _is_false_alarm),
        _fact("advice without evidence", judged, _is_unfounded),
        _fact("right verdict with another change than the label's", judged, _is_other_action),
    ]  # fmt: skip
    head = ["", "| | cases | held out | strangers |", "|---|---|---|---|"]
    return "\n".join([*lines, *head, *facts])


def _row(title: str, judged: Sequence[Judged]) -> str:
    cells = []
    for part in PARTS:
        found = _of(part, judged)
        rate = f"{100 * share(each.is_right for each in found):.0f} %" if found else ""
        cells += [str(len(found)), rate]
    own = f"{100 * share(each.verdict == each.case.cause for each in judged):.0f} %"
    return f"| {title} | {' | '.join(cells)} | {own} |"


def _of(part: str, judged: Sequence[Judged]) -> list[Judged]:
    return [each for each in judged if each.case.part == part]


def _is_acceptable(each: Judged) -> bool:
    return each.is_right and each.verdict != each.case.cause


def _contradicts(each: Judged) -> bool:
    return bool(each.contradictions)


def _is_false_alarm(each: Judged) -> bool:
    return each.is_false_alarm


def _is_unfounded(each: Judged) -> bool:
    return each.is_unfounded


def _is_other_action(each: Judged) -> bool:
    return each.has_action is False


def _fact(title: str, judged: Sequence[Judged], holds: Any) -> str:
    return f"| {title} | {' | '.join(str(sum(map(holds, _of(part, judged)))) for part in PARTS)} |"


def wrong(judged: Sequence[Judged]) -> list[str]:
    """A line for each case that is wrong in any way. Of held-out cases only the causes: their names
    would tell rule writers too much."""
    lines = []
    for each in judged:
        flaws = [f"contradiction {change}" for change in each.contradictions]
        if each.has_action is False:
            flaws.append(f"changes {each.changes} instead of {each.case.actions}")
        if each.is_right and not flaws:
            continue
        name = "a held-out case" if each.case.part == "held_out" else each.case.name
        lines.append(f"{name}: {each.case.cause} was called {each.verdict}; {'; '.join(flaws)}")
    return lines


def documented() -> str:
    """The table as docs/doctor.md has it."""
    text = DOCUMENT.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> None:
    judged = judge_all(cases())
    print("\n".join(wrong(judged)))
    shown = table(judged)
    print(shown)
    text = DOCUMENT.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{after}")


if __name__ == "__main__":
    main()
