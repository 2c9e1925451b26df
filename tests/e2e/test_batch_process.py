"""``setpoint batch`` as a process with a real model: killed, interrupted, out of room, and always
ending with every answer once."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from setpoint_testing.server_process import PATIENCE_S, engine_of, wait_until


class Batches:
    """Runs of one command in one folder."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *arguments: str,
        source: str = "in.jsonl",
        output: str = "out.jsonl",
    ) -> None:
        self.out = folder / output
        self._errors = folder / "stderr.txt"
        options = [
            "--model-path",
            str(model),
            "--dtype",
            "float32",
            "--num-threads",
            "1",
            "--max-total-tokens",
            "4096",
            *arguments,
        ]
        self._command = [
            sys.executable,
            "-m",
            "setpoint.cli",
            "batch",
            str(folder / source),
            "-o",
            str(self.out),
            *options,
        ]

    def start(self, **options: Any) -> subprocess.Popen[str]:
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                **options,
            )

    def run(self, **options: Any) -> tuple[int, str]:
        with self.start(**options) as process:
            output, _ = process.communicate(timeout=PATIENCE_S * 2)
        return process.returncode, output

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def num_bytes(self) -> int:
        return self.out.stat().st_size if self.out.exists() else 0

    def ids(self) -> list[str]:
        # Bytes: text would also be split at the odd line separators that a random model writes.
        return [json.loads(line)["custom_id"] for line in self.out.read_bytes().splitlines()]


def write_lines(folder: Path, count: int, *, max_tokens: int = 8) -> list[str]:
    with (folder / "in.jsonl").open("w") as file:
        for number in range(count):
            body = {"prompt": f"Prompt {number}", "max_tokens": max_tokens, "ignore_eos": True}
            file.write(
                json.dumps(
                    {
                        "custom_id": f"id-{number}",
                        "method": "POST",
                        "url": "/v1/completions",
                        "body": body,
                    }
                )
                + "\n"
            )
    return [f"id-{number}" for number in range(count)]


def wait_for_bytes(batches: Batches, process: subprocess.Popen[str], above: int) -> None:
    wait_until(lambda: batches.num_bytes > above or process.poll() is not None)
    assert process.poll() is None, batches.errors


def kill_again_and_again(batches: Batches, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        with batches.start() as process:
            wait_for_bytes(batches, process, batches.num_bytes + rng.randrange(100_000))
            engine = engine_of(process.pid)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        engine.wait(PATIENCE_S)


def test_killed_then_interrupted_then_finished(tiny_model: Path, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 1800)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("nonsense\n")
    batches = Batches(tiny_model, tmp_path, "--keep-order")
    kill_again_and_again(batches, 1, seed=1)

    with batches.start(start_new_session=True) as process:
        wait_for_bytes(batches, process, batches.num_bytes)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine gets it too
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, batches.errors
    assert "Stopping: open requests have 10 s to finish." in batches.errors
    assert "Traceback" not in batches.errors
    assert output.endswith("Run the same command again to continue.\n")
    assert "answered, 0 failed" in output
    done = batches.ids()
    assert done == expected[: len(done)]
    assert len(done) < 1800

    code, output = batches.run()
    assert code == 3, batches.errors
    assert batches.ids() == [*expected, None]
    assert (
        f"1801 of 1801 requests done, {len(done)} of them in earlier runs: 1800 answered, 1 failed."
        in output
    )
    assert "1 × not_json, e.g. line 1801" in output


@pytest.mark.full
def test_killed_again_and_again_every_request_is_answered_exactly_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    expected = write_lines(tmp_path, 4000)
    batches = Batches(tiny_model, tmp_path)
    kill_again_and_again(batches, 6, seed=3)
    code, output = batches.run()
    assert code == 0, batches.errors
    assert sorted(batches.ids()) == sorted(expected)
    assert "4000 answered, 0 failed" in output
    again, output = batches.run()
    assert (again, "4000 of them in earlier runs" in output) == (0, True)


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once(tiny_model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path, 400, max_tokens=2000)
    batches = Batches(tiny_model, tmp_path)
    with batches.start() as process:
        wait_until(lambda: "running" in batches.errors or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "Stopping" in batches.errors)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, batches.errors
    assert not batches.out.exists() or len(batches.ids()) < 400, (
        "it did not wait for the answers that were under way"
    )
    assert "Traceback" not in batches.errors


@pytest.mark.full
def test_a_dead_engine_ends_the_run_with_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    expected = write_lines(tmp_path, 900)
    batches = Batches(tiny_model, tmp_path, "--max-engine-restarts", "0")
    with batches.start() as process:
        wait_for_bytes(batches, process, 0)
        engine = engine_of(process.pid)
        engine.kill()
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "setpoint: error: The engine process was ended by SIGKILL" in batches.errors
    assert output.endswith("Run the same command again to continue.\n")
    assert 0 < len(batches.ids()) < 900
    assert batches.run()[0] == 0
    assert sorted(batches.ids()) == sorted(expected)


@pytest.mark.full
def test_no_room_for_the_output(tiny_model: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for a full disk: both refuse a write in its middle."""
    expected = write_lines(tmp_path, 200)
    batches = Batches(tiny_model, tmp_path)
    code, _ = batches.run(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    )
    assert code == 1
    (line,) = (line for line in batches.errors.splitlines() if line.startswith("setpoint: error: "))
    assert "out.jsonl cannot be written: File too large. The answers in it are complete." in line
    assert "Traceback" not in batches.errors
    assert 0 < len(batches.ids()) < 200
    assert batches.run()[0] == 0
    assert sorted(batches.ids()) == sorted(expected)


@pytest.mark.full
def test_failures_are_counted_and_give_code_3_and_parquet_is_written_at_the_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path, 3)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("nonsense\n")
    batches = Batches(tiny_model, tmp_path, output="out.parquet")
    for _ in range(2):
        code, output = batches.run()
        assert code == 3, batches.errors
        assert (
            "1 × not_json, e.g. line 4" in output or "is complete: 4 requests, 1 failed" in output
        )
    rows = pq.read_table(batches.out).to_pylist()
    assert sorted(row["custom_id"] or "" for row in rows) == ["", "id-0", "id-1", "id-2"]
    assert not list(tmp_path.glob("*.journal.jsonl"))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("content", "arguments", "code", "message"),
    [
        ("", [], 1, "holds no requests"),
        ('{"custom_id": "a"}\n{"custom_id": "a"}\n', [], 1, "'a' on lines 1 and 2"),
        (None, [], 1, "cannot be read: No such file"),
        ("{}\n", ["-o", "absent/out.jsonl"], 1, "cannot be written: No such file"),
        ("{}\n", ["-o", "in.jsonl"], 1, "is the input"),
        ("{}\n", ["-o", "-"], 2, "A batch cannot use '-' for stdin or stdout"),
        ("{}\n", ["--port", "1"], 2, "--port belongs to 'setpoint serve'"),
    ],
)
def test_what_cannot_begin_says_so_in_one_line_before_anything_starts(
    tmp_path: Path,
    content: str | None,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    from setpoint import cli

    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("in.jsonl").write_text(content)
    assert cli.main(["batch", "in.jsonl", "-o", "out.jsonl", *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.full
def test_a_parquet_input(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"custom_id": str(number), "prompt": "Hello", "max_tokens": 2} for number in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    batches = Batches(tiny_model, tmp_path, source="in.parquet")
    assert batches.run()[0] == 0, batches.errors
    assert sorted(batches.ids()) == ["0", "1", "2", "3"]
