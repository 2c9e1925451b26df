"""The machine and the commit that figures belong to, and whether other programs use the machine."""

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
PACKAGES = ("setpoint", "torch", "transformers", "aiohttp")
"""Their versions stand beside the figures of servers."""


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The output of ``git describe``; "-dirty" marks changes that are not committed, except in the
    result files of benchmarks."""
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
    """One line with the machine, the versions of ``packages`` and the commit. times: whether the
    benchmark times anything; if it does, it ends here if ``level`` or SETPOINT_CPU_ISA asks for
    emulated tiles."""
    chosen = level or os.environ.get(LEVEL_VARIABLE, "")
    if times and is_emulated(chosen):
        sys.exit(f"{chosen} exists for tests: its times say nothing about any machine.")
    named = ", ".join(f"{name} {number}" for name, number in versions(*packages).items())
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {named}, commit {commit()}"


def busy_cpu_s() -> float:
    """CPU seconds that all programs of this machine have used since it started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def is_quiet(within_s: float = 1.0, *, busy_share: float = 0.07) -> bool:
    """Whether at most ``busy_share`` of the CPUs was in use during the next ``within_s``
    seconds."""
    return psutil.cpu_percent(interval=within_s) <= 100 * busy_share


def bandwidth(num_threads: int) -> float:
    """Bytes per second that the threads read together."""
    # Here, because most scripts measure no bandwidth and start without torch.
    from setpoint.engine.kernels.cpu.library import load
    from setpoint.engine.kernels.cpu.peak_rates import LARGEST, CpuPeakRates

    return CpuPeakRates(load(), num_threads).read_bytes_per_s(LARGEST)


def save(
    folder: Path, name: str, figures: Mapping[str, Any], *, packages: Mapping[str, str], load: float
) -> Path:
    """Write ``figures`` to folder/<date>-<name>.json, with the command, the machine, the commit and
    ``packages`` (``versions``); returns the path.

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
    """The text with ``~`` in place of this user's home folder wherever a path, or an item of a list
    of paths, begins with it."""
    home = os.path.expanduser("~").rstrip("/")
    return (
        re.sub(rf'(?<=["\s=:]){re.escape(home)}(?=["/\s:])', "~", text)
        if home.startswith("/")
        else text
    )
