"""What comments and pages refer to exists: pages and their sections, decisions, files that the
pages about the code name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import setpoint

REPOSITORY = Path(setpoint.__file__).parents[2]
SUFFIXES = {".py", ".md", ".cpp", ".h", ".toml", ".sh", ".txt"}
FOLDERS = ("src", "tests", "docs", "benchmarks", "scripts")
PAGE = re.compile(r"(?<![\w/])docs/([\w./-]+?\.md)(?:#([\w-]+))?")
"""A page named from anywhere, from the root of the repository."""
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]*)(?:#([\w-]+))?\)")
"""Markdown's link, relative to its page."""
DECISION = re.compile(r"[Dd]ecisions? (\d{4})")
ELSEWHERE = re.compile(
    r"\b(FACTS|DESIGN|RESEARCH|STYLE|REVIEW|BREAKING)\b(?!\s*=)|§|(?<![\w/])(\.\./)?shared/"
)
"""Signs of a document outside of the repository."""
CODE_PATH = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|cpp|h|json|md))`|`([\w-]+\.(?:py|cpp|h))`")
DESCRIBING = [
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("architecture", "kernels", "add-a-model", "quantization")),
]
"""Pages about the code as it is today; the decisions and the notebook may name what is gone."""
STATUS = re.compile(
    r"^# \d{4}: .*\n\n\*\*Status\.\*\* (In force\.|Superseded)((?:.|\n)*?)\n\n\*\*Context\.\*\*"
)


@cache
def texts() -> dict[Path, str]:
    """Every source and page, but for this file, whose patterns name what is looked for."""
    paths = [
        path
        for folder in FOLDERS
        for path in sorted((REPOSITORY / folder).rglob("*"))
        if path.suffix in SUFFIXES
    ]
    paths += [
        *sorted(REPOSITORY.glob("*.md")),
        REPOSITORY / "Makefile",
        REPOSITORY / "pyproject.toml",
    ]
    this = REPOSITORY / "tests/arch/test_references.py"
    return {path: path.read_text() for path in paths if path != this}


@cache
def anchors(page: Path) -> frozenset[str]:
    """The sections of a page, as GitHub makes anchors of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    )


def references() -> Iterator[tuple[str, Path, str | None]]:
    """(where it stands, file, section)."""
    for path, text in texts().items():
        where = str(path.relative_to(REPOSITORY))
        for page, section in PAGE.findall(text):
            yield where, REPOSITORY / "docs" / page, section or None
        if path.suffix == ".md":
            for target, section in LINK.findall(text):
                if not re.match(r"\w+:", target):
                    yield (
                        where,
                        (path.parent / target).resolve() if target else path,
                        section or None,
                    )


def test_pages_and_sections_exist() -> None:
    broken = []
    for where, target, section in references():
        if not target.exists():
            broken.append(f"{where}: {target.relative_to(REPOSITORY)} does not exist")
        elif section is not None and target.suffix == ".md" and section not in anchors(target):
            broken.append(f"{where}: {target.relative_to(REPOSITORY)} has no section #{section}")
    assert not broken, "\n".join(broken)


def test_the_search_finds_references() -> None:
    found = {(where, section) for where, _, section in references()}
    assert ("src/setpoint/scheduler/budget.py", "admission") in found
    assert len([where for where, _ in found if where.startswith("src/")]) > 30


def test_no_document_outside_of_the_repository_is_named() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for path, text in texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if ELSEWHERE.search(line)
    ]
    assert not found, "\n".join(found)


def test_decisions_that_are_named_exist() -> None:
    numbers = {path.name[:4] for path in (REPOSITORY / "docs/decisions").glob("*.md")}
    named = {number for text in texts().values() for number in DECISION.findall(text)}
    assert named
    assert named <= numbers


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "docs/decisions").glob("*.md")), ids=lambda path: path.name[:4]
)
def test_a_decision_has_a_status_and_a_superseded_one_names_a_later_one(path: Path) -> None:
    status = STATUS.match(path.read_text())
    assert status, (
        'begin with "# NNNN: title", then a paragraph "**Status.** In force." or "**Status.**'
        ' Superseded …", then "**Context.**"'
    )
    successors = [target[:4] for target, _ in LINK.findall(status[2])]
    assert status[1] == "In force." or successors
    assert all(successor > path.name[:4] for successor in successors)


@pytest.mark.parametrize("page", DESCRIBING)
def test_files_that_a_page_names_exist(page: str) -> None:
    named = {long or short for long, short in CODE_PATH.findall((REPOSITORY / page).read_text())}
    every = [
        f"/{path.relative_to(REPOSITORY)}"
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*")
    ]
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in every)}
    assert not missing
