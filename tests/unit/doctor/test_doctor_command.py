"""``setpoint doctor``: exit codes, the forms of its output, and one clear sentence about whatever
cannot be read."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from setpoint import cli
from setpoint.core.errors import SourceError
from setpoint.doctor.checks import CHECKS
from setpoint.doctor.readers import pages
from setpoint.doctor.readers.sources import observe_sources

CASES = Path(__file__).parents[2] / "doctor_corpus" / "cases"


def log(name: str) -> str:
    return gzip.decompress((CASES / f"{name}.log.gz").read_bytes()).decode()


@pytest.fixture
def capped(tmp_path: Path) -> Path:
    """A log whose verdict is seq-cap."""
    path = tmp_path / "server.log"
    path.write_text(log("cap-16-of-many"))
    return path


def run(*words: str | Path) -> int:
    return cli.main(["doctor", *map(str, words)])


def test_a_finding_is_exit_code_1_and_one_screen(
    capped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capped) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "seq-cap" in lines[0]
    assert any(line.startswith("Type     --max-running-requests ") for line in lines)
    assert len(lines) <= 45


def test_a_healthy_log_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CASES / "healthy-l40s-2025.log.gz") == 0
    assert "healthy" in capsys.readouterr().out.splitlines()[0]


def test_json(capped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capped, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    first = said["findings"][0]
    assert said["verdict"] == first["cause"] == "seq-cap"
    assert first["action"]["flag"] == "--max-running-requests"
    assert first["action"]["direction"] == "increase"
    assert said["coverage"] == 1.0
    lines = capped.read_text().splitlines()
    assert all(
        lines[each["line"] - 1].startswith(each["text"][:80])
        for each in first["evidence"]
        if each["line"]
    )


def test_all_shows_more(capped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capped, "--all") == 1
    assert "Wrong if" in capsys.readouterr().out


def test_standard_input(capped: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "setpoint.cli", "doctor", "-", "--json"],
        input=capped.read_bytes(),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"] == "seq-cap"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.cause)
def test_every_cause_is_explained(check: object, capsys: pytest.CaptureFixture[str]) -> None:
    cause = check.cause  # type: ignore[attr-defined]
    assert run("--explain", cause) == 0
    text = capsys.readouterr().out
    assert "When the doctor reports it" in text
    assert max(map(len, text.splitlines())) <= 100
    assert run("--explain", "list") == 0
    assert cause in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a source: setpoint doctor SOURCE"),
        (("",), "a SOURCE is empty"),
        (("/proc/self/mem",), "cannot be read: Input/output error"),
        (("--explain", "nonsense"), "no cause 'nonsense'"),
        (("x.log", "--seconds", "0"), "--seconds must be at least 1"),
        (("x.log", "--jsn"), "unknown option --jsn"),
        (("x.log", "--watch", "--json"), "cannot be combined with --json"),
        (("-", "--watch"), "not possible with standard input"),
    ],
)
def test_a_wrong_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("setpoint: error: ")
    assert captured.err.count("\n") == 1


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def bad(name: str, folder: Path) -> Path:
    """Makes what cannot be read."""
    path = folder / name
    if name == "empty.log":
        path.write_bytes(b"")
    elif name == "blank.log":
        path.write_bytes(b"\n \n\n")
    elif name == "binary.log":
        path.write_bytes(bytes(range(256)) * 100)
    elif name == "model.gz":
        path.write_bytes(gzip.compress(bytes(range(256)) * 100))
    elif name == "broken.gz":
        path.write_bytes(gzip.compress(b"x" * 10_000)[:9])
    elif name == "nginx.log":
        path.write_text('10.0.0.1 - - [22/Nov/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 12\n' * 99)
    elif name == "vllm.log":
        line = "INFO 11-22 10:00:00 [loggers.py:123] Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%\n"
        path.write_text(line * 99)
    elif name == "empty-folder":
        path.mkdir()
    elif name == "folder":
        path.mkdir()
        (path / "notes.txt").write_text("nothing about engines\n")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "missing.log",
        "empty.log",
        "blank.log",
        "binary.log",
        "model.gz",
        "broken.gz",
        "nginx.log",
        "vllm.log",
        "empty-folder",
        "folder",
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bad(name, tmp_path)
    assert run(path, *(["--json"] if form == "json" else [])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert name in captured.err
    assert captured.err.startswith("setpoint: error: ")
    assert captured.err.endswith(".\n")


def test_a_server_that_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert run(f"http://127.0.0.1:{port}", "--seconds", "1") == 2
    error = capsys.readouterr().err
    assert str(port) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://", "'http://' is not a URL"),
        ("https://bad host", "'https://bad host' is not a URL"),
        ("http://[::1", "'http://[::1' is not a URL"),
        ("http://no-such-host.invalid", "http://no-such-host.invalid cannot be reached: "),
    ],
)
def test_a_url_that_leads_nowhere_is_named_as_typed(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(url, "--seconds", "1") == 2
    error = capsys.readouterr().err
    assert words in error
    assert "moments=true" not in error
    assert error.count("\n") == 1


def test_the_api_key_is_sent_and_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str | None] = []

    class Guarded(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert run(url, "--seconds", "1", "--api-key", "s3cret") == 2
        server.shutdown()
        thread.join()
    assert asked == ["Bearer s3cret"]
    error = capsys.readouterr().err
    assert f"{url} needs an API key" in error
    assert "s3cret" not in error


def test_a_healthy_log_has_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    path = CASES / "healthy-l40s-2025.log.gz"
    run(path)
    assert "Evidence" in capsys.readouterr().out
    run(path, "--json")
    assert json.loads(capsys.readouterr().out)["evidence"][0]["line"] > 0


def test_a_pipe_with_a_name_and_a_closed_standard_input(capped: Path) -> None:
    doctor = f"{sys.executable} -m setpoint.cli doctor"
    for words, code, said in ((f"<(cat {capped})", 1, "seq-cap"), ("- <&-", 2, "is closed")):
        done = subprocess.run(
            ["bash", "-c", f"{doctor} {words}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_server_that_never_answers(
    silent: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "TIMEOUT_S", 0.5)
    assert run(silent, "--seconds", "1") == 2
    error = capsys.readouterr().err
    assert silent in error
    assert "did not answer within 0.5 s" in error
    assert error.count("\n") == 1


@pytest.mark.timeout(60)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    """Red before: a pipe without a writer was waited for in silence, and a device was said to be
    packed."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(SourceError, match=f"{path} is no plain file"):
            observe_sources([str(path)], seconds=1)


def test_a_closed_pipe_is_no_error(capped: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m setpoint.cli doctor {capped} --all | head -1",
        shell=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stderr == b""
    assert done.stdout.count(b"\n") == 1


def test_watching_a_log_that_grows(tmp_path: Path) -> None:
    """Without a terminal: a line whenever the verdict changes; Ctrl-C ends with its exit code."""
    text = log("cap-16-of-many").splitlines(keepends=True)
    path = tmp_path / "server.log"
    path.write_text("".join(text[:20]))
    watching = subprocess.Popen(
        [sys.executable, "-m", "setpoint.cli", "doctor", str(path), "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert watching.stdout is not None
        assert "not-enough-evidence" in watching.stdout.readline()
        with path.open("a") as file:
            file.write("".join(text[20:]))
        assert "seq-cap" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=30) == 1
        assert watching.stderr is not None
        assert watching.stderr.read() == ""
    finally:
        watching.kill()
        watching.communicate()
