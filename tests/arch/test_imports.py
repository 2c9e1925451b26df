"""Who may import whom (the table of docs/architecture.md); no cycles; and the control plane keeps
torch out of the process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter

import pytest
from import_rules import ALLOWED
from package_source import MODULES, ROOT, imports, is_below, modules, top_level_imports

CONTROL_PLANE = (
    "core",
    "planning",
    "observe",
    "config",
    "checkpoint",
    "ipc",
    "scheduler",
    "grammar",
    "recording",
    "frontend",
    "doctor",
    "batch",
    "cli",
    "launch.parent",
    "offline",
    "chat",
    "commands",
    "top",
    "playback",
    "bench",
)
DETERMINISTIC = ("scheduler", "planning")
"""Clock and randomness are injected here, so that a simulator can own them."""


def package_of(module: str) -> str | None:
    """None for what is in no package of the table."""
    return max((package for package in ALLOWED if is_below(module, package)), key=len, default=None)


PACKAGED = [name for name in MODULES if name]


def inner_imports(module: str) -> set[str]:
    """Modules of ours that a module imports. A package is named with what is in it, and has no code
    itself."""
    found = {
        name.removeprefix("setpoint.")
        for name in imports(modules()[module])
        if name.startswith("setpoint.")
    }
    return {
        name for name in found if name in MODULES and not (ROOT / name.replace(".", "/")).is_dir()
    }


def outer_imports(module: str) -> set[str]:
    """Packages that are neither ours nor Python's."""
    tops = {name.partition(".")[0] for name in imports(modules()[module])}
    return tops - sys.stdlib_module_names - {"setpoint"}


def allows(entries: Collection[str], module: str) -> bool:
    """An entry allows what is below it, but not what is a package of its own there."""
    return any(
        is_below(module, entry)
        and not any(
            is_below(module, package) and package != entry and is_below(package, entry)
            for package in ALLOWED
        )
        for entry in entries
    )


def test_every_module_is_in_a_package() -> None:
    """If this fails: add the package with what it imports."""
    assert [name for name in PACKAGED if package_of(name) is None] == []


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_exactly_what_the_table_allows(package: str) -> None:
    ours, third_party = ALLOWED[package]
    members = [module for module in PACKAGED if package_of(module) == package]
    assert members, "the package is gone: remove its entry"
    used: set[str] = set()
    for module in members:
        for imported in inner_imports(module):
            if package_of(imported) != package:
                assert allows(ours, imported), f"{module} imports {imported}"
                used.add(imported)
        assert outer_imports(module) <= third_party, module
    unused = {entry for entry in ours if not any(allows([entry], each) for each in used)}
    unused |= third_party - {package for module in members for package in outer_imports(module)}
    assert not unused, "remove what is allowed and not used"


def test_rooms_form_no_circles() -> None:
    graph = {
        package: {
            other
            for module in PACKAGED
            if package_of(module) == package
            for imported in inner_imports(module)
            if (other := package_of(imported)) is not None and other != package
        }
        for package in ALLOWED
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"a circle of packages: {' <- '.join(error.args[1])}") from None


def folder_of(module: str) -> str:
    return module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


def test_folders_form_no_circles() -> None:
    """A package of one file would hide a circle of folders; this test does not know the packages."""
    graph: dict[str, set[str]] = {}
    for module, tree in modules().items():
        names = {found.removeprefix("setpoint.") for found in imports(tree)}
        folders = {folder_of(name) for name in names if name in MODULES}
        graph.setdefault(folder_of(module), set()).update(folders - {folder_of(module)})
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"a circle of folders: {' <- '.join(error.args[1])}") from None


def test_a_room_is_a_folder() -> None:
    """But for the command, which picks the others."""
    files = [package for package in ALLOWED if not (ROOT / package.replace(".", "/")).is_dir()]
    assert files == ["cli"]


def test_no_import_cycles() -> None:
    graph = {
        module: {
            name
            for name in (found.removeprefix("setpoint.") for found in imports(tree))
            if name in MODULES and name != module
        }
        for module, tree in modules().items()
    }
    done: set[str] = set()
    for start in graph:
        path: list[str] = []

        def visit(module: str, path: list[str] = path) -> None:
            assert module not in path, (
                f"import cycle: {' -> '.join([*path[path.index(module) :], module])}"
            )
            if module in done:
                return
            path.append(module)
            for other in sorted(graph[module]):
                visit(other)
            path.pop()
            done.add(module)

        visit(start)


@pytest.mark.parametrize(
    "module",
    [name for name in MODULES if any(is_below(name, package) for package in DETERMINISTIC)],
)
def test_clock_and_randomness_are_injected(module: str) -> None:
    assert not {"time", "random", "datetime", "secrets"} & {
        name.partition(".")[0] for name in imports(modules()[module])
    }


def test_control_plane_leaves_torch_out() -> None:
    names = [
        f"setpoint.{name}"
        for name in MODULES
        if any(is_below(name, package) for package in CONTROL_PLANE)
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nheavy ="
        " {'torch', 'transformers', 'triton', 'xgrammar'} &"
        " set(sys.modules)\nsys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_loads_its_names_when_they_are_used() -> None:
    code = (
        "import sys, setpoint\n"
        "def loaded(): return sorted(name for name in sys.modules if name.startswith('setpoint.'))\n"
        "print(loaded(), setpoint.__version__, loaded())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(
        r"\[\] [\d.]+ \['setpoint.core', 'setpoint.core.version'\]\n", done.stdout
    ), done.stderr
    code = (
        "import sys; from setpoint import Engine, SamplingParams; print({'torch', 'starlette',"
        " 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_pickle_is_never_imported() -> None:
    for module, tree in modules().items():
        found = {name.partition(".")[0] for name in imports(tree)}
        assert not {"pickle", "dill", "cloudpickle"} & found, module


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("transformers", "engine.models.transformers_model"),
        ("opentelemetry", "frontend.telemetry.tracing"),
        ("prometheus_client", "frontend.telemetry.metrics.exposition"),
    ],
)
def test_a_slow_or_optional_library_has_one_home_and_is_loaded_on_use(
    library: str, home: str
) -> None:
    """The home may import it at its top if nobody imports the home at theirs."""
    importers = {
        module
        for module, tree in modules().items()
        if any(is_below(name, library) for name in imports(tree)) and not is_below(module, "doctor")
    }
    assert importers == {home}
    at_once = any(is_below(name, library) for name in top_level_imports(modules()[home]))
    eager = {
        module
        for module, tree in modules().items()
        if f"setpoint.{home}" in set(top_level_imports(tree))
    }
    assert not (at_once and eager)
