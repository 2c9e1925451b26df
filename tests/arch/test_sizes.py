"""Files stay readable and functions short, without exceptions; files of C++, JavaScript and style sheets,
too.

One concept, one file: the limit is there to make an author ask whether a file holds two concepts,
not to have a concept cut in two.
"""

from __future__ import annotations

import ast
from pathlib import Path

from package_source import REPOSITORY, ROOT, trees

MAX_FILE = 600
MAX_FUNCTION = 60


def other_files() -> list[Path]:
    """A minified library has a line or two."""
    patterns = ("*.cpp", "*.h", "*.js", "*.css")
    return [path for pattern in patterns for path in sorted(ROOT.rglob(pattern))]


def test_files_are_short() -> None:
    assert {path.suffix for path in other_files()} == {".cpp", ".h", ".js", ".css"}
    for path in [*trees(), *other_files()]:
        name, lines = str(path.relative_to(REPOSITORY)), len(path.read_text().splitlines())
        assert lines <= MAX_FILE, f"{name} has {lines} lines"


def test_functions_are_short() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                name = f"{path.relative_to(REPOSITORY)}:{node.name}"
                assert lines <= MAX_FUNCTION, f"{name} has {lines} lines"


def test_modules_say_what_they_are() -> None:
    for path, tree in trees().items():
        if path.is_relative_to(ROOT):
            assert ast.get_docstring(tree), f"{path.relative_to(ROOT)} has no module docstring"
