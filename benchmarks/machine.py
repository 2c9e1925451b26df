"""What every benchmark prints first: the machine and the commit that its figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """``git describe``; "-dirty" marks changes that no commit has."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def environment(*packages: str) -> str:
    """Machine, versions of ``packages`` and commit, as one line."""
    named = ", ".join(f"{name} {number}" for name, number in versions(*packages).items())
    return f"{cpu_name()}, {os.cpu_count()} CPUs, {named}, commit {commit()}"
