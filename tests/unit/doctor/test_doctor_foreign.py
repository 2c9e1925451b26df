"""Texts that no server wrote are refused, whatever they mention. Logs that begin and end with a
crash, before the first batch, are diagnosed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_doctor_unseen import Log

from setpoint import cli
from setpoint.core.errors import SourceError
from setpoint.doctor.checks.diagnose import diagnose
from setpoint.doctor.readers.log.reader import read_chunks

REPOSITORY = Path(__file__).parents[3]
TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/home/me/setpoint/train.py", line 88, in <module>',
    "    loss.backward()",
    '  File "/home/me/sglang-finetune/.venv/lib/torch/_tensor.py", line 522, in backward',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 79.10 GiB of which 102.44 MiB is free.",
]
NGINX = [
    '2026/11/28 22:14:01 [error] 29#29: *11 connect() failed, upstream: "http://sglang:30000/v1"',
    "2026/11/28 22:14:02 [alert] 1#1: worker process 29 exited on signal 11 (core dumped)",
    '10.0.0.7 - - [28/Nov/2026:22:14:03 +0000] "POST /v1/completions HTTP/1.1" 502 157 "-" "x"',
]
FOREIGN = {
    "a word": ["we saw SIGSEGV"],
    "a word about sglang": ["yesterday sglang died with SIGKILL, exit code 137", "out of memory"],
    "another program is killed": [
        "Nov 28 22:14:00 host kernel: Out of memory: Killed process 77 (chrome)"
    ],
    "a program without a name is killed": ["./train.sh: line 3: 71 Killed   python train.py"],
    "a traceback of torch": TRACEBACK,
    "nginx": NGINX,
    "gunicorn": [
        "[2026-11-28 22:14:02 +0000] [7] [CRITICAL] WORKER TIMEOUT (pid:24)",
        "[2026-11-28 22:14:03 +0000] [7] [ERROR] Worker (pid:24) was sent SIGKILL! Perhaps out of"
        " memory?",
    ],
    "uvicorn": ['INFO:     10.0.0.7:4183 - "GET /health HTTP/1.1" 503 Service Unavailable'] * 9,
    "a pod": ["Readiness probe failed: HTTP probe failed with statuscode: 503", "OOMKilled"],
    "a thread's name": ["[2026-11-28 22:14:02 Thread1] CUDA error: unspecified launch failure"],
}


def read(lines: list[str]) -> str:
    (seen,) = read_chunks("server.log", [("\n".join(lines) + "\n").encode()])
    return diagnose(seen).verdict


@pytest.mark.parametrize("lines", FOREIGN.values(), ids=FOREIGN)
def test_a_text_without_a_line_of_a_server_is_refused(lines: list[str]) -> None:
    with pytest.raises(SourceError, match="SGLang"):
        read(lines)


@pytest.mark.parametrize(
    "name",
    [
        "CHANGELOG.md",
        "docs/notebook.md",
        "docs/tuning.md",
        "docs/doctor-causes.md",
        "docs/engines.md",
        "docs/ranks.md",
    ],
)
def test_our_own_pages_are_no_logs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(REPOSITORY / name)]) == 2
    assert "none that SGLang or Setpoint writes" in capsys.readouterr().err


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CRASHES = {
    "a frame of SGLang": (
        [
            "Traceback (most recent call last):",
            '  File "/opt/venv/lib/python3.12/site-packages/sglang/srt/model_executor/'
            'model_runner.py", line 88, in load_model',
            OOM,
        ],
        "oom-init",
    ),
    "a frame of Setpoint": (
        [
            "Traceback (most recent call last):",
            '  File "/srv/clone/src/setpoint/engine/runner/model_runner.py", line 8, in load',
            "MemoryError: out of memory: cannot allocate memory",
        ],
        "oom-init",
    ),
    "a command and its end": (
        ["+ python3 -m sglang.launch_server --port 1", "Killed"],
        "server-dead",
    ),
    "a command": (["python3 -m sglang.launch_server --port 1", "Killed"], "server-dead"),
    "a prompt": (["$ setpoint serve --model-path m", "Killed"], "server-dead"),
    "a container's name": (["sglang-1  | Killed"], "server-dead"),
    "a pod's name": (["[pod/sglang-7d9f/server] Killed"], "server-dead"),
    "the end of a container": (["sglang-1 exited with code 137"], "server-dead"),
    "systemd": (
        [
            "Nov 28 22:14:00 host systemd[1]: sglang.service: Main process exited, code=killed, status=9/KILL"
        ],
        "server-dead",
    ),
    "the kernel": (["kernel: Out of memory: Killed process 7 (sglang::schedul)"], "server-dead"),
    "a rank": (
        ["[2026-04-01 10:00:00 DP1 TP0] CUDA error: an illegal memory access"],
        "server-dead",
    ),
    "its own words": (
        ["[2026-04-01 10:00:00] Received sigquit from a child process. It usually means the child"],
        "server-dead",
    ),
}


@pytest.mark.parametrize(("lines", "verdict"), CRASHES.values(), ids=CRASHES)
def test_a_crash_before_the_first_batch_is_diagnosed(lines: list[str], verdict: str) -> None:
    assert read(lines) == verdict


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "server.log").write_text("\n".join(Log().serve(60, 200, 0.97).lines) + "\n")
    (tmp_path / "nginx.log").write_text("\n".join(NGINX) + "\n")
    return tmp_path


def test_a_foreign_file_beside_a_log_is_left_out_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, log, foreign = (
        folder / "server.log",
        str(folder / "server.log"),
        str(folder / "nginx.log"),
    )
    assert cli.main(["doctor", "--json", str(alone)]) == 1
    right = json.loads(capsys.readouterr().out)["verdict"]
    for words in ([log, foreign], [foreign, log], [str(folder)]):
        assert cli.main(["doctor", "--json", *words]) == 1
        said = json.loads(capsys.readouterr().out)
        assert said["verdict"] == right
        assert "nginx.log" in json.dumps(said["sources"])


def test_foreign_files_alone_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(folder / "nginx.log"), str(folder / "nginx.log")]) == 2
    assert "nginx.log" in capsys.readouterr().err


def test_a_folder_says_that_its_subfolders_are_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    above = folder.parent / "above"
    above.mkdir()
    folder.rename(above / "inner")
    assert cli.main(["doctor", str(above)]) == 2
    said = capsys.readouterr().err
    assert "(it has 0 files). Subfolders are not read; name one: inner." in said
