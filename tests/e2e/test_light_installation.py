"""The package in an empty environment, without any extra: what it brings, and that its commands run
or say what they need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from doctor_runs import SHORT, run_for

from setpoint.config.commands import COMMANDS

REPOSITORY = Path(__file__).parents[2]
LOG = REPOSITORY / "tests" / "doctor_corpus" / "cases" / "cap-16-of-many.log.gz"
ABSENT = "torch", "tokenizers", "llguidance", "psutil", "yaml"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the light installation, in a folder without its sources."""
    root = tmp_path_factory.mktemp("light")
    sources, home = root / "sources", root / "home"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", sources / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, sources / name)
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    install = [home / "bin" / "python", "-m", "pip", "install", "-q"]
    constraints = REPOSITORY / "constraints.txt"
    subprocess.run([*install, "-c", constraints, sources], check=True, timeout=500)
    return home


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [home / "bin" / "setpoint", *arguments],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer_of(url: str) -> bytes:
    """Asks again until the server listens."""
    while True:
        try:
            with urlopen(url, timeout=60) as answer:
                return bytes(answer.read())
        except URLError:
            time.sleep(0.05)


def test_no_engine_comes_along(home: Path) -> None:
    (packages,) = home.glob("lib/python3*/site-packages")
    there = {path.name for path in packages.iterdir()}
    assert there & {"setpoint", "numpy", *ABSENT} == {"setpoint", "numpy"}


def test_the_doctor_reads_a_log(home: Path) -> None:
    done = run(home, "doctor", str(LOG))
    assert (done.returncode, done.stderr) == (1, "")
    assert "seq-cap" in done.stdout


def test_a_recording_is_replayed_and_read(home: Path, tmp_path: Path) -> None:
    recording = run_for(20, tmp_path, load=SHORT, users=24, max_running_requests=4).recording
    replayed = run(home, "replay", str(recording))
    assert (replayed.returncode, replayed.stderr) == (0, "")
    assert "0 differing plans" in replayed.stdout
    assert "seq-cap" in run(home, "doctor", str(recording)).stdout


def test_the_console_shows_a_recording(home: Path, tmp_path: Path) -> None:
    recording = run_for(5, tmp_path, load=SHORT, users=4).recording
    command = [home / "bin" / "setpoint", "console", recording, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as console:
        try:
            assert console.stdout is not None
            (url,) = re.findall(r"http://\S+", console.stdout.readline())
            assert "moments" in json.loads(answer_of(f"{url}/recording"))
        finally:
            console.terminate()
        assert console.wait(60) == 0


def test_the_help_says_what_is_not_installed(home: Path) -> None:
    done = run(home, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "serve, batch, chat, models, bench offline, bench one-batch" in done.stdout
    assert f"{home}/bin/pip install -e '.[serve]'" in done.stdout


@pytest.mark.parametrize("name", [name for name, each in COMMANDS.items() if each.extra])
def test_a_command_of_an_extra_says_how_to_install_it(home: Path, name: str) -> None:
    done = run(home, *name.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"setpoint: error: 'setpoint {name}' needs packages that are not installed: in Setpoint's"
        f" folder, run {home}/bin/pip install -e '.[{COMMANDS[name].extra}]'.\n"
    )
    assert run(home, *name.split(), "--help").returncode == 0


@pytest.mark.parametrize("name", [name for name, each in COMMANDS.items() if not each.extra])
def test_every_other_command_begins(home: Path, name: str) -> None:
    """Each is asked for something that is not there: what it imports is installed."""
    arguments = {"top": ["http://127.0.0.1:9"], "set": ["http://127.0.0.1:9"]}
    done = run(home, name, *arguments.get(name, ["nothing.here"]))
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("setpoint: error: ")
    assert done.stderr.count("\n") == 1
