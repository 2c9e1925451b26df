"""The command: exit codes, one-line errors, and nothing heavy imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from setpoint import __version__, cli
from setpoint.config.commands import COMMANDS


@pytest.mark.parametrize("spelling", ["--version", "-V", "version"])
def test_version(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([spelling]) == 0
    assert capsys.readouterr().out == f"setpoint {__version__}\n"


def test_every_command_runs_something() -> None:
    assert cli._RUNS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_without_a_command_the_help_is_printed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Red before: the error that a command was missing, and exit code 2."""
    assert cli.main(words) == 0
    alone = capsys.readouterr()
    assert cli.main([*words, "--help"]) == 0
    assert (alone.out, alone.err) == (capsys.readouterr().out, "")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "\n  serve           serve a model over HTTP\n" in text
    assert "\n  batch           answer a file" in text


def test_help_of_bench_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    lines = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  ") and "--" not in line
    ]
    assert [line[0] for line in lines] == ["serving", "offline", "one-batch", "quality"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["xyz"], "unknown command 'xyz'. See 'setpoint --help'."),
        (["serv"], "unknown command 'serv'. Did you mean 'serve'? See 'setpoint --help'."),
        (["bnech"], "Did you mean 'bench'?"),
        (
            ["run", "org/model"],
            "unknown command 'run'. 'setpoint chat org/model' talks to a model, and"
            " 'setpoint serve org/model' serves it.",
        ),
        (["list"], "unknown command 'list'. 'setpoint models MODEL' says of a folder"),
        (["pull", "llama3.2"], "'setpoint serve owner/name' downloads a model"),
        (["ps"], "'setpoint top URL' shows a running server. See 'setpoint --help'."),
        (["run"], "'setpoint chat' talks to a model, and 'setpoint serve' serves it."),
        (["run", "llama3.2:1b"], "'setpoint chat owner/name' talks to a model"),
        (["run", "llama3"], "'setpoint chat owner/name' talks to a model"),
        (["serve", "--enable-cors"], "unknown option --enable-cors. See"),
        (["serve", "--keep-alive", "5m"], "of several, the keep_alive of a request"),
        (
            ["bench", "servign"],
            "unknown command 'bench servign'. Did you mean 'bench serving'?"
            " See 'setpoint bench --help'.",
        ),
        (["serve", "--page-sise", "3"], "unknown option --page-sise"),
        (["serve", "--port", "99999"], "--port must be at most 65535"),
    ],
)
def test_a_bad_command_line_is_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("setpoint: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_bad_environment_is_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_LOG_MS", "perhaps")
    assert cli.main(["serve"]) == 2
    assert "SGLANG_LOG_MS" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "batch"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys\nfrom setpoint import cli\ntry:\n    cli.main(['{command}', '--help'])\nexcept"
        " SystemExit:\n    pass\nheavy = {'torch', 'numpy', 'starlette', 'uvicorn', 'transformers',"
        " 'huggingface_hub', 'psutil'} & sys.modules.keys()\nsys.exit(f'imported: {heavy}' if"
        " heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--page-size" in done.stdout
