"""``setpoint route``: what smg is started with, and what is refused before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from setpoint import cli

FAKE = """
import json, pathlib
def main(arguments):
    pathlib.Path(__file__).with_name("called.json").write_text(json.dumps(arguments))
"""


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which a package in the place of smg writes its arguments."""
    package = tmp_path / "smg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("smg", "smg.cli"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package / "called.json"


def run(*arguments: str) -> int:
    return cli._code(["route", *arguments])


def test_smg_gets_the_servers_and_a_probe_that_tells_of_draining(
    called: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    urls = ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]
    assert run(*urls, "--policy", "round_robin", "--port", "30333") == 0
    text = called.read_text()
    for part in (*urls, "round_robin", "30333", "/ready", "127.0.0.1", "secret-key"):
        assert f'"{part}"' in text
    said = capsys.readouterr().err
    assert said.startswith("Starting: smg launch --worker-urls http://127.0.0.1:30000")
    assert "secret-key" not in said


def test_what_is_wrong_is_said_in_one_line(
    called: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ([], "name the servers"),
        (["127.0.0.1:30000"], "http://127.0.0.1:30000"),
        (["http://127.0.0.1:30000", "--policy", "best"], "--policy"),
    ):
        assert run(*arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not called.exists()


def test_without_smg_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("setpoint.config.extras.find_spec", lambda name: None)
    assert run("http://127.0.0.1:30000") == 2
    assert ".venv/bin/pip install -e '.[route]'" in capsys.readouterr().err
