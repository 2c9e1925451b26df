"""How often the doctor is right about the corpus; ``python tests/unit/doctor_accuracy.py`` writes
the table of docs/doctor.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setpoint.advisor.doctor.diagnose import diagnose
from setpoint.advisor.doctor.findings import Report
from setpoint.advisor.doctor.lives import main_one
from setpoint.advisor.doctor.readers.sources import observe_sources
from setpoint.core.errors import SourceError

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
    is_held_out: bool


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
    return [
        _case(path, is_held_out=folder == "held_out")
        for folder in ("cases", "held_out")
        for path in sorted((CORPUS / folder).glob("*.json"))
    ]


def _case(path: Path, *, is_held_out: bool) -> Case:
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
        is_held_out=is_held_out,
    )


def _change(change: dict[str, str]) -> Change:
    return change["flag"], change["direction"]


def report_on(path: Path) -> Report:
    seen = observe_sources([str(path)], seconds=0.0)
    report, _ = main_one([(diagnose(life), life) for life in seen])
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
    """In Markdown: a row for each cause, of the cases that rule writers saw and of the others."""
    rows: defaultdict[str, list[Judged]] = defaultdict(list)
    for each in judged:
        rows[each.case.cause].append(each)
    lines = [
        "| cause | cases | right | held out | right |",
        "|---|---|---|---|---|",
        *(_row(f"`{cause}`", rows[cause]) for cause in sorted(rows)),
        _row("all", judged),
    ]
    seen = [each for each in judged if not each.case.is_held_out]
    unseen = [each for each in judged if each.case.is_held_out]
    facts = [
        _fact("verdicts that are not the label's cause but acceptable", seen, unseen, _is_acceptable),
        _fact("changes that contradict one another or would make it worse", seen, unseen, _contradicts),
        _fact("false alarms about healthy servers", seen, unseen, _is_false_alarm),
        _fact("advice without evidence", seen, unseen, _is_unfounded),
        _fact("right verdict with another change than the label's", seen, unseen, _is_other_action),
    ]  # fmt: skip
    head = ["", "| | cases | held out |", "|---|---|---|"]
    return "\n".join([*lines, *head, *facts])


def _row(title: str, judged: Sequence[Judged]) -> str:
    cells = []
    for is_held_out in (False, True):
        part = [each for each in judged if each.case.is_held_out == is_held_out]
        rate = f"{100 * share(each.is_right for each in part):.0f} %" if part else ""
        cells += [str(len(part)), rate]
    return f"| {title} | {' | '.join(cells)} |"


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


def _fact(title: str, seen: Sequence[Judged], unseen: Sequence[Judged], holds: Any) -> str:
    return f"| {title} | {sum(map(holds, seen))} | {sum(map(holds, unseen))} |"


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
        name = "a held-out case" if each.case.is_held_out else each.case.name
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
