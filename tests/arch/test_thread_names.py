"""The page about processes and threads names the threads that the code starts, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import setpoint

SOURCE = Path(setpoint.__file__).parent
PAGE = SOURCE.parents[1] / "docs/processes.md"
NAMED_WITH = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}
NAMERS = {"worker", "WorkerThread"}
"""Make a thread of the name that is their first argument."""
OF_ASYNCIO = {"asyncio_0"}


def names_in(tree: ast.Module) -> Iterator[str]:
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        made = getattr(call.func, "attr", getattr(call.func, "id", ""))
        candidates = [each.value for each in call.keywords if each.arg == NAMED_WITH.get(made)]
        if made == "ThreadPoolExecutor":
            candidates += call.args[1:2]
        elif made in NAMERS:
            candidates += call.args[:1]
        yield from (
            each.value
            for each in candidates
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )


def test_the_page_lists_every_named_thread() -> None:
    started = {
        name for path in SOURCE.rglob("*.py") for name in names_in(ast.parse(path.read_text()))
    }
    assert "cache-load" in started
    rows = re.findall(r"^\| (`[^|]*?) \|", PAGE.read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    others = PAGE.read_text().partition("## Threads of the other programs")[2]
    listed |= set(re.findall(r"`(setpoint-\w+)`", others))
    assert listed - OF_ASYNCIO == started
