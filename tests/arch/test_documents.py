"""The table of packages in docs/architecture.md says what the rules say: every package stands in it, and
the last column is what the package may import.

After a change of the rules: ``python tests/arch/test_documents.py`` writes that column anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from import_rules import ALLOWED

import setpoint

REPOSITORY = Path(setpoint.__file__).parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
ROW = re.compile(r"^\| `([\w.]+?)/?` \| (.*) \| ([^|]*) \|$", re.MULTILINE)
"""Package, what it holds, what it may import."""


def top_of(package: str) -> str:
    return package.partition(".")[0]


def imports_of(package: str) -> str:
    """The packages that this one and those below it may import, in one cell."""
    found = {
        top_of(other)
        for below, (ours, _) in ALLOWED.items()
        if top_of(below) == package
        for other in ours
    }
    return ", ".join(sorted(found - {package})) or "–"


def packages() -> set[str]:
    return {top_of(package) for package in ALLOWED}


def written(page: str) -> str:
    def row(found: re.Match[str]) -> str:
        name = found[1].removesuffix(".py")
        if name not in packages():
            return found[0]
        return f"| `{found[1] if found[1].endswith('.py') else name + '/'}` | {found[2]} | {imports_of(name)} |"

    return ROW.sub(row, page)


def test_the_table_of_imports_is_the_rules() -> None:
    page = PAGE.read_text()
    assert page == written(page)


def test_every_package_stands_in_the_table() -> None:
    named = {
        name.removesuffix(".py")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([\w.]+?)/?`", line.split("|")[1])
    }
    assert packages() - {"cli"} <= named


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
