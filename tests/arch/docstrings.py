"""The docstrings of all Python files of the repository, those of attributes included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from package_source import REPOSITORY, trees


class Docstring(NamedTuple):
    path: Path
    line: int
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(REPOSITORY)}:{self.line}"


def docstrings() -> Iterator[Docstring]:
    """Every string that is a statement: at the head of a module, class or function, or behind the
    assignment that it describes."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Docstring(path, node.lineno, text.strip())
