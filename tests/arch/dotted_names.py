"""Whether a dotted name in a docstring, such as ``core.plan.Rows``, names what exists."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from package_source import FOLDERS, REPOSITORY, trees

FILES = {"json", "jsonl", "mjs", "py", "txt"}
"""How names of files end."""
ABBREVIATIONS = {"np", "nn"}
OF_OTHERS = {
    "chat.completion.chunk",
    "message.tools",
    "output_config.format",
    "response.in_progress",
    "rope.scaling",
    "sglang.srt",
    "thinking.budget_tokens",
    "thinking.type",
}
"""What the APIs, formats and programs of others define."""
Scope = ast.Module | ast.ClassDef


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    match node:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AnnAssign(target=target):
            yield target


def _defined(scope: Scope, *, is_package: bool = False) -> Iterator[str]:
    """The names that a module or class defines, for a class also what its methods set on self, for
    a package also what it imports from its modules."""
    for node in ast.walk(scope) if isinstance(scope, ast.ClassDef) else _statements(scope):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(names=names) if is_package:
                yield from (each.name for each in names)
        if isinstance(node, ast.stmt):
            for target in _targets(node):
                match target:
                    case ast.Name(id=name):
                        yield name
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        yield name


def _statements(module: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, those under its conditions included."""
    pending = list(module.body)
    while pending:
        node = pending.pop()
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                pending += [each for each in getattr(node, field, []) if isinstance(each, ast.stmt)]


def _module_name(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return tuple(part for part in parts if part not in (*FOLDERS, "__init__"))


@cache
def _modules() -> Mapping[tuple[str, ...], list[Path]]:
    """Each ending of a module's name -> the modules that have it."""
    found = defaultdict(list)
    for path in trees():
        name = _module_name(path)
        for begin in range(len(name)):
            found[name[begin:]].append(path)
    return found


@cache
def _classes() -> Mapping[str, list[ast.ClassDef]]:
    found = defaultdict(list)
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


@cache
def _members(name: str) -> frozenset[str]:
    """What the classes of this name have, with their bases."""
    found: set[str] = set()
    for node in _classes().get(name, []):
        found.update(_defined(node))
        for base in node.bases:
            last = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if last != name:
                found |= _members(last)
    return frozenset(found)


@cache
def _all_members() -> frozenset[str]:
    return frozenset(member for name in _classes() for member in _members(name))


@cache
def _names_of(path: Path) -> frozenset[str]:
    """The variables, parameters, attributes and keywords in a file."""
    found = set()
    for node in ast.walk(trees()[path]):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
    return frozenset(found)


@cache
def _globals(path: Path) -> frozenset[str]:
    return frozenset(_defined(trees()[path], is_package=path.name == "__init__.py"))


def _is_in_module(parts: Sequence[str]) -> bool:
    """Whether the name is that of a module, or of something in one, or of a member of a class
    there; modules may be named by the end of their names."""
    for count in range(len(parts), 0, -1):
        for path in _modules().get(tuple(parts[:count]), []):
            match parts[count:]:
                case []:
                    return True
                case [name] if name in _globals(path):
                    return True
                case [name, member] if name in _globals(path) and member in _members(name):
                    return True
    return False


def _is_outside(parts: Sequence[str]) -> bool:
    """Whether the first part names an installed module, by its usual abbreviation, or a built-in
    type. Modules are not loaded, so what stands in them is not checked."""
    first = parts[0]
    if (first,) in _modules():
        return False
    return first in ABBREVIATIONS or hasattr(builtins, first) or find_spec(first) is not None


def _is_of_variable(parts: Sequence[str], path: Path) -> bool:
    """Whether the file has a variable of the first name, and all others name fields."""
    known = _all_members() | _names_of(path)
    return parts[0] in _names_of(path) and all(
        part in known and part[0].islower() for part in parts[1:]
    )


def exists(dotted: str, path: Path) -> bool:
    """Whether a name in a docstring of this file names something: a module or a part of one, a
    member of a class, a field of a variable of the file, a file, or what others define."""
    parts = dotted.split(".")
    return (
        dotted in OF_OTHERS
        or parts[-1] in FILES
        or _is_in_module(parts)
        or parts[1] in _members(parts[0])
        or _is_of_variable(parts, path)
        or _is_outside(parts)
    )
