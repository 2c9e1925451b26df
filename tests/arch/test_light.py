"""The light installation: which commands need no engine, and that they import nothing of what only
the engine needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from setpoint.config.commands import COMMANDS
from setpoint.config.extras import EXTRAS

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LIGHT = {
    "doctor": ("setpoint.commands.doctor_command", "setpoint.doctor.readers.sources"),
    "top": ("setpoint.commands.top_command",),
    "set": ("setpoint.commands.set_command",),
    "console": ("setpoint.commands.console_command",),
    "replay": ("setpoint.commands.replay_command",),
}
"""Commands that the plain installation runs -> the modules that they import."""
BLOCKED = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)

sys.meta_path.insert(0, Blocked())
for name in {modules}:
    importlib.import_module(name)
print(sorted({{name.partition(".")[0] for name in sys.modules}} & {blocked}))
"""


def names_of(requirements: list[str]) -> set[str]:
    """The packages that requirements name, in one spelling."""
    return {_plain(re.split(r"[\[<>=~! ]", each)[0]) for each in requirements}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_without(blocked: set[str], modules: tuple[str, ...]) -> str:
    script = BLOCKED.format(blocked=blocked, modules=modules)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_only_these_commands_need_no_extra() -> None:
    """If this fails for a new command: give it an extra, or add it to LIGHT."""
    assert {name for name, command in COMMANDS.items() if not command.extra} == LIGHT.keys()


@pytest.mark.parametrize("command", LIGHT)
def test_a_light_command_imports_nothing_of_an_extra(command: str) -> None:
    blocked = {module.partition(".")[0] for modules in EXTRAS.values() for module in modules}
    assert imported_without(blocked, LIGHT[command]) == "[]"


def test_the_benchmark_of_servers_needs_no_engine() -> None:
    blocked = {module for module in EXTRAS["serve"] if module not in EXTRAS["bench"]}
    assert imported_without(blocked, ("setpoint.bench.serving",)) == "[]"


@pytest.mark.parametrize("extra", ["serve", "bench"])
def test_an_extra_is_found_by_the_modules_that_it_brings(extra: str) -> None:
    homes = packages_distributions()
    brought = {_plain(home) for module in EXTRAS[extra] for home in set(homes[module])}
    assert brought == names_of(PROJECT["optional-dependencies"][extra])


def test_what_is_always_installed_is_in_no_extra() -> None:
    both = names_of(PROJECT["dependencies"]) & names_of(PROJECT["optional-dependencies"]["serve"])
    assert both == set()


@pytest.mark.parametrize("command", ["doctor", "top"])
def test_what_reads_logs_and_figures_starts_without_numpy(command: str) -> None:
    """Nor with an HTTP client or a parser of metrics in the doctor, whose usual source is a log."""
    blocked = {"numpy"} | ({"httpx2", "prometheus_client"} if command == "doctor" else set())
    assert imported_without(blocked, LIGHT[command]) == "[]"
