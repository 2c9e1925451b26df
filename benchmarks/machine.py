"""The machine and the commit that figures belong to, and whether anybody else is using the
machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from setpoint.engine.kernels.cpu.build import LEVEL_VARIABLE, is_emulated

REPOSITORY = Path(__file__).resolve().parent.parent


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """``git describe``; "-dirty" marks changes that no commit has, those of other benchmarks'
    result files aside."""
    name = _git("describe", "--always")
    changes = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return name + ("-dirty" if changes else "") if name else "unknown"


def _git(*arguments: str) -> str:
    git = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment(*packages: str, level: str | None = None, times: bool = True) -> str:
    """Machine, versions of ``packages`` and commit, as one line. Ends a benchmark that ``times``
    something if it would time emulated tiles, by ``level`` or by SETPOINT_CPU_ISA."""
    chosen = level or os.environ.get(LEVEL_VARIABLE, "")
    if times and is_emulated(chosen):
        sys.exit(f"{chosen} exists for tests: its times say nothing about any machine.")
    named = ", ".join(f"{name} {number}" for name, number in versions(*packages).items())
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {named}, commit {commit()}"


def busy_cpu_s() -> float:
    """CPU seconds that this machine has worked since it started, for anybody."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def is_quiet(within_s: float = 1.0, *, busy_share: float = 0.07) -> bool:
    """Whether at most ``busy_share`` of the CPUs was in use during the next ``within_s``
    seconds."""
    return psutil.cpu_percent(interval=within_s) <= 100 * busy_share


def save(
    folder: Path, name: str, figures: Mapping[str, Any], *, packages: Mapping[str, str], load: float
) -> Path:
    """Keep ``figures`` in folder/<date>-<name>.json with what they belong to: command, machine,
    commit and ``packages`` (``versions``).

    load: the load average before the measurement. The home folder is written as ~, and paths in
    this repository begin there, so that the file names nobody.
    """
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = {
        "date": date,
        "command": ["python", *sys.argv],
        "machine": {"cpu": cpu_name(), "cpus": os.cpu_count(), "load_average_before": load},
        "commit": commit(),
        "versions": dict(packages),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{date}-{name}.json"
    text = json.dumps(record, indent=1, ensure_ascii=False).replace(f"{REPOSITORY}/", "")
    path.write_text(without_home(text) + "\n")
    return path


def without_home(text: str) -> str:
    """``~`` for this user's home folder, wherever a path or an item of a list of paths begins with
    it."""
    home = os.path.expanduser("~").rstrip("/")
    return (
        re.sub(rf'(?<=["\s=:]){re.escape(home)}(?=["/\s:])', "~", text)
        if home.startswith("/")
        else text
    )
