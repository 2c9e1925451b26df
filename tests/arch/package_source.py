"""The Python source of the repository as syntax trees, for the tests of its rules."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import setpoint

ROOT = Path(setpoint.__file__).parent
REPOSITORY = ROOT.parents[1]
FOLDERS = ("src", "benchmarks", "scripts", "tests")


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = _modules()
"""Dotted name below setpoint -> file."""


@cache
def trees() -> dict[Path, ast.Module]:
    gc.disable()  # it would scan the growing trees again and again, which takes longer than parsing
    try:
        return {
            path: ast.parse(path.read_text(), filename=str(path))
            for folder in FOLDERS
            for path in sorted((REPOSITORY / folder).rglob("*.py"))
        }
    finally:
        gc.freeze()
        gc.enable()


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name below setpoint -> syntax tree."""
    return {name: trees()[path] for name, path in MODULES.items()}


@cache
def imports(tree: ast.AST) -> Sequence[str]:
    """Every imported module, type-checking and function-level ones included."""
    return list(_imports(tree))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package"
            assert node.module is not None
            yield node.module
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module.startswith("setpoint")
            )


def is_below(name: str, package: str) -> bool:
    return package == "" or name == package or name.startswith(package + ".")


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)
