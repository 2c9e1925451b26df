"""Prints an --ignore for each test file that a change cannot break, for ``make quick``. What is
left are those that have changed, whose imports have, or the imports of these.

Usage: scripts/tests_of_diff.py [BASE]. The change is what differs from BASE, uncommitted and new
files included; without BASE from the branch main, or on main from its last commit. tests/arch reads
every file and always stays. Tests of whole servers (tests/e2e) do not import what they start, so
they stay only if they, or what they share, have changed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"setpoint": ROOT / "src", "setpoint_testing": ROOT / "tests"}


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def changed(base: str) -> set[Path]:
    names = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in names}


def file_of(name: str, beside: Path) -> Path | None:
    """The file of a module: of ours, or a helper that stands beside a test or above it."""
    source = SOURCES.get(name.partition(".")[0])
    folders = [source] if source else [beside, ROOT / "tests" / "unit", ROOT / "benchmarks"]
    for folder in folders:
        path = folder / name.replace(".", "/")
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
    return None


@cache
def imported(path: Path) -> frozenset[Path]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(found for name in names if (found := file_of(name, path.parent)))


def reached(path: Path) -> set[Path]:
    found, left = {path}, [path]
    while left:
        new = imported(left.pop()) - found
        found |= new
        left += new
    return found


def stands_for(path: Path) -> set[Path]:
    """The Python files that stand for a changed one: for C++, pages and styles those of their
    package, for a removed file those of its folder, for a page the tests that name docs/."""
    if path.suffix == ".py" and path.is_file():
        return {path}
    if path.is_relative_to(ROOT / "src"):
        folder = path.parent
        while not list(folder.glob("*.py")):
            folder = folder.parent
        return set(folder.glob("*.py"))
    if path.suffix == ".md":
        return {each for each in tests() if '"docs' in each.read_text()}
    return set()


@cache
def tests() -> tuple[Path, ...]:
    return tuple(sorted((ROOT / "tests").rglob("test_*.py")))


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    if base == "main" and git("rev-parse", "HEAD") == git("rev-parse", "main"):
        base = "HEAD" if git("status", "--porcelain") else "HEAD~1"
    files = {found for path in changed(base) for found in stands_for(path)}
    if any(path.name == "conftest.py" for path in files):
        files |= set(tests())
    for test in tests():
        if "arch" not in test.parts and not files & reached(test):
            print(f"--ignore={test.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
