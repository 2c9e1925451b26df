"""Every ``setpoint`` command of docs/tuning.md, as it stands there, on a real server of the default
model. Only addresses and files are replaced by those of the test, and watching is shortened.

The first ``setpoint serve`` of the page is the server that all other commands talk to; every other
one is started beside it, answers, and ends. A command of another kind fails until this file knows
how to run it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import setpoint
from setpoint_testing.page_commands import commands
from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server

PAGE = Path(setpoint.__file__).parents[2] / "docs" / "tuning.md"
URL = "http://127.0.0.1:30000"
COMMANDS = list(
    dict.fromkeys(
        tuple(words[1:]) for words in commands(PAGE.read_text(), "setpoint") if len(words) > 2
    )
)
"""Without the name of the program; those of a single word are only mentioned."""
SHARED = next(words for words in COMMANDS if words[0] == "serve")
QUICK = [
    next(words for words in COMMANDS if words[0] == kind) for kind in ("serve", "set", "doctor")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("tuning"), *SHARED[1:]) as server:
        yield server


def answers(server: ServerProcess) -> bool:
    sampling = {"max_new_tokens": 2, "temperature": 0}
    answer = server.generate(text="The capital of France is", sampling_params=sampling)
    return bool(answer["text"])


def here(words: tuple[str, ...], server: ServerProcess, log: Path) -> list[str]:
    """The words with this server's address and log."""
    at = {URL: server.url, "30000": str(server.port), "server.log": str(log)}
    return [at.get(word, word) for word in words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "setpoint.cli", *words],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


def first_line(*words: str) -> str:
    """What a command that does not end by itself prints first."""
    with subprocess.Popen(
        [sys.executable, "-m", "setpoint.cli", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            return process.stdout.readline()
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "words",
    [
        # One of each kind; each further one takes seconds of a core, a server seconds of two.
        words if words in QUICK else pytest.param(words, marks=pytest.mark.full)
        for words in COMMANDS
    ],
    ids=" ".join,
)
def test_a_command_of_the_page(
    words: tuple[str, ...], server: ServerProcess, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    log.write_text(server.errors)
    typed = here(words, server, log)
    match words[0]:
        case "serve" if words == SHARED:
            assert answers(server)
        case "serve":
            with running_server(tmp_path, *words[1:]) as own:
                assert answers(own)
        case "set":
            done = run(*typed)
            assert done.returncode == 0, done.stderr
            assert " -> " in done.stdout or "Nothing changes" in done.stdout
            assert answers(server)
        case "doctor":
            watched = ["--seconds", "1"] if server.url in typed else []
            done = run(*typed, *watched)
            assert done.returncode == (0 if "--explain" in words else done.returncode)
            assert done.returncode in (0, 1), done.stderr
            assert done.stdout.strip()
        case "top":
            assert first_line(*typed).strip()
        case "bench":
            done = run(*typed)
            assert done.returncode == 0, done.stderr
        case other:
            pytest.fail(f"say here how to run `setpoint {other}`")


def test_the_page_has_commands_of_every_kind() -> None:
    assert {"serve", "set", "doctor", "top", "bench"} <= {words[0] for words in COMMANDS}
