"""Commands and options on the pages exist: every ``setpoint`` line is read as the program would
read it, targets and scripts are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import setpoint
from setpoint.config.commandline import parse
from setpoint.config.commands import COMMANDS
from setpoint.config.sglang import ALIASES, KNOWN
from setpoint_testing import page_commands

REPOSITORY = Path(setpoint.__file__).parents[2]
HISTORY = ("notebook.md", "CHANGELOG.md")
"""Their commands are those of their day, mistyped ones included."""
PAGES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in (".", "docs", "docs/sglang", "benchmarks")
    for path in (REPOSITORY / folder).glob("*.md")
    if path.name not in HISTORY
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {
    "--pd-disaggregation",
    "--prefill",
    "--decode",
    "--no-deps",
    "--index-url",
    "--version",
    "--help",
    "--nproc-per-node",
    "--master-addr",
}
"""Options of pip and torchrun, and those that every command has."""


def page_text(page: str) -> str:
    return (REPOSITORY / page).read_text()


def commands(page: str, *programs: str) -> Iterator[list[str]]:
    return page_commands.commands(page_text(page), *programs)


@cache
def other_sources() -> str:
    """The programs with options of their own."""
    folders = (REPOSITORY / "benchmarks", REPOSITORY / "tests/setpoint_testing")
    return "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("page", PAGES)
def test_setpoint_lines_are_read(page: str) -> None:
    for _, *words in commands(page, "setpoint"):
        name = next(
            (
                name
                for name in sorted(COMMANDS, key=len, reverse=True)
                if words[: name.count(" ") + 1] == name.split()
            ),
            None,
        )
        if name is not None and "--help" not in words:
            parse(COMMANDS[name], words[name.count(" ") + 1 :])
        else:
            assert words in ([], ["bench"], ["COMMAND"]) or "--help" in words, (
                f"{page}: setpoint {' '.join(words)}"
            )


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_scripts_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for _, *words in commands(page, "make"):
        assert {word for word in words if "=" not in word} <= targets, (
            f"{page}: make {' '.join(words)}"
        )
    for _, *words in commands(page, "python"):
        if words and words[0].endswith(".py"):
            assert (REPOSITORY / words[0]).is_file(), f"{page}: {words[0]}"


@pytest.mark.parametrize("page", PAGES)
def test_options_exist_here_or_in_sglang(page: str) -> None:
    known = (
        {field.flag for command in COMMANDS.values() for field in command.fields()}
        | KNOWN
        | ALIASES.keys()
        | OTHERS
    )
    unknown = {
        flag
        for flag in FLAG.findall(page_text(page))
        if not any(option.startswith(flag) for option in known)
        and f'"{flag}"' not in other_sources()
    }
    assert not unknown


def test_the_search_finds_commands() -> None:
    assert ["setpoint", "bench", "one-batch"] in [
        words[:3] for words in commands("docs/bench.md", "setpoint")
    ]
    assert any("--base-url" in words for words in commands("docs/chat.md", "setpoint"))
    assert ["make", "serve"] in list(commands("README.md", "make"))
