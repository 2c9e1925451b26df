"""What is to be measured on a GPU, rehearsed on a CPU: parts are cut, killed and resumed, and what they have
found until then is in valid files beside aims and predictions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gpu.models import GPT_OSS, LLAMA_8B, QWEN3_0_6B, V2_LITE
from gpu.results import AIMS, Part, Results, end_of, read, table, verdict
from gpu.run_all import PARTS, run_part

from gpu import run_all, steps, throughput
from setpoint_testing.server_process import wait_until

SCRIPT = Path(run_all.__file__)
REPOSITORY = SCRIPT.parents[2]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
PATIENCE_S = 300.0


def test_aims_are_of_results_that_there_will_be() -> None:
    names = {steps.decode_name(LLAMA_8B, *each) for each in steps.DECODES}
    names |= {steps.not_hidden_name(LLAMA_8B, rows) for rows, _ in steps.DECODES}
    names |= {
        steps.decode_name(name, *each) for name in (GPT_OSS, V2_LITE) for each in steps.OF_MIXTURES
    }
    names |= {steps.prefill_name(LLAMA_8B, 8192), steps.graphs_name(LLAMA_8B)}
    names |= {throughput.offline_name(name, 256) for name in (QWEN3_0_6B, LLAMA_8B)}
    assert AIMS.keys() <= names | {throughput.many_rows_name(1024, 1000)}


def test_the_smaller_time_and_the_larger_rate_are_better() -> None:
    time, rate = "Llama-3.1-8B bf16, 1 row at 1,024", "Qwen3-0.6B bf16, 256 requests"
    assert [verdict(time, value, "ms") for value in (4.0, 4.1, 4.3, 4.6, 4.7)] == [
        "good", "good", "first", "first", "missed",
    ]  # fmt: skip
    assert [verdict(rate, value, "tok/s") for value in (25e3, 24e3, 20e3, 18e3, 17e3)] == [
        "good", "good", "first", "first", "missed",
    ]  # fmt: skip


def test_the_table_has_values_beside_predictions_and_aims(tmp_path: Path) -> None:
    out = Results(tmp_path, "steps", rehearsal=False)
    out.add("Llama-3.1-8B bf16, 1 row at 1,024", 9.0, "ms", predicted=3.7)
    out.add("Llama-3.1-8B bf16, 1 row at 1,024", 4.25, "ms", predicted=3.7)
    out.add("a share", 71.0, "%", microseconds=12.3)
    out.attempt("another", lambda: out.add("before", 1) or 1 / 0)
    end_of(tmp_path, "steps", "done", seconds=61.0, compiled=3, rehearsal=False)
    part = read(tmp_path, "steps")
    assert part is not None
    assert part.is_done
    lines = table([part]).splitlines()
    assert "## steps (done, 61 s, kernels compiled: 3)" in lines
    assert lines[-5:] == [
        "|---|---|---|---|---|---|",
        "| Llama-3.1-8B bf16, 1 row at 1,024 | 4.25 ms | 3.70 ms | 4.60 ms | 4.10 ms | first |",
        "| a share | 71.0 % (12.3 µs) |  |  |  |  |",
        "| before | 1 |  |  |  |  |",
        "| another | failed: ZeroDivisionError: division by zero |  |  |  |  |",
    ]


def test_a_rehearsal_is_marked_and_has_neither_aims_nor_predictions(tmp_path: Path) -> None:
    out = Results(tmp_path, "steps", rehearsal=True)
    out.add("Llama-3.1-8B bf16, 1 row at 1,024", 9.0, "ms", predicted=3.7)
    part = read(tmp_path, "steps")
    assert part is not None
    assert not part.is_done
    text = table([part])
    assert text.startswith("# A rehearsal: nothing here says how fast anything is\n")
    assert "| Llama-3.1-8B bf16, 1 row at 1,024 | 9.00 ms |  |  |  |  |" in text


def test_a_part_that_never_began_is_in_the_table(tmp_path: Path) -> None:
    end_of(tmp_path, "sweeps", "not begun: no time was left", rehearsal=False)
    assert "## sweeps (not begun: no time was left)" in table([read(tmp_path, "sweeps")])  # type: ignore[list-item]


def test_a_part_is_cut_at_its_limit(tmp_path: Path) -> None:
    run_part("steps", tmp_path, limit_s=0.5, rehearse=True)
    part = read(tmp_path, "steps")
    assert isinstance(part, Part)
    assert part.found["state"] == "cut at its limit"
    assert part.found["seconds"] < 60


def results_of(path: Path) -> list[dict[str, Any]]:
    """What the file of a part has now, which is valid at any moment."""
    return json.loads(path.read_text())["results"] if path.exists() else []


def is_running(part: str, out: Path) -> bool:
    """Whether a part with results in this folder still runs."""
    command = ["gpu.part", part, str(out)]
    return any(
        (process.info["cmdline"] or [])[2:5] == command
        for process in psutil.process_iter(["cmdline"])
    )


def test_a_killed_run_leaves_valid_files_and_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path), "--only"]
    command += ["rates", "steps"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_until(lambda: results_of(tmp_path / "steps.json"), timeout_s=PATIENCE_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running("steps", tmp_path))
    before = (tmp_path / "rates.json").read_text()
    assert read(tmp_path, "rates").is_done  # type: ignore[union-attr]
    assert not read(tmp_path, "steps").is_done  # type: ignore[union-attr]
    assert "## rates (done" in (tmp_path / "results.md").read_text()

    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "rates.json").read_text() == before
    for name in ("rates", "steps"):
        assert read(tmp_path, name).is_done, name  # type: ignore[union-attr]
        assert not any(str(each["value"]).startswith("failed") for each in results_of(
            tmp_path / f"{name}.json"
        ))  # fmt: skip
    assert (tmp_path / "results.md").read_text() == done.stdout[done.stdout.index("#") : -1]
    names = [each["name"] for each in results_of(tmp_path / "steps.json")]
    assert "Llama-3.1-8B bf16, prefill of 32" in names
    assert any("a whole step, by the host" in name for name in names)
    assert not list(tmp_path.glob(".*")), "no file is left half-written"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path), "--only", "steps"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "steps.json").exists(), timeout_s=PATIENCE_S)
    of_part = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)  # the second one of an impatient user changes nothing
    _, said = process.communicate()
    assert process.returncode == 128 + number
    assert said == f"run_all.py: {number.name}: the rest is for --resume\n"
    assert of_part
    assert not psutil.wait_procs(of_part, timeout=0)[1]
    assert read(tmp_path, "steps").found["state"] == "interrupted"  # type: ignore[union-attr]
    assert "## steps (interrupted, " in (tmp_path / "results.md").read_text()


def refused(*options: str) -> str:
    """The one line with which a run is refused where there is no GPU."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--only", "rates"],
        env=NO_GPU,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("run_all.py: ")
    return line


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path: Path) -> None:
    """It is refused before torch is imported, and no table is written."""
    assert "no GPU: CUDA_VISIBLE_DEVICES" in (line := refused("--out", str(tmp_path / "new")))
    assert "--rehearse" in line
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_part_does_not_measure_the_cpu(tmp_path: Path) -> None:
    """What the files of a driver promise, torch may not be able to use."""
    run_part("rates", tmp_path, limit_s=PATIENCE_S, rehearse=False)
    part = read(tmp_path, "rates")
    assert part is not None
    assert part.found["state"] == "ended with code 1; see its log"
    assert not part.found["results"]
    assert "torch cannot use a GPU" in (tmp_path / "rates.log").read_text()


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_results_of_two_kinds_are_never_in_one_folder(
    tmp_path: Path, resume: tuple[str, ...]
) -> None:
    end_of(tmp_path, "steps", "done", rehearsal=False)
    before = (tmp_path / "steps.json").read_text()
    line = refused("--rehearse", "--out", str(tmp_path), *resume)
    assert line.endswith(f"{tmp_path} has results of a GPU: name another folder")
    assert (tmp_path / "steps.json").read_text() == before
    end_of(tmp_path, "steps", "done", rehearsal=True)
    assert run_all.other_kind(tmp_path, rehearse=False) == "a rehearsal"
    assert run_all.other_kind(tmp_path, rehearse=True) is None


@pytest.mark.parametrize("minutes", ["nan", "0", "-5", "inf", "ten"])
def test_minutes_are_a_number_above_zero(tmp_path: Path, minutes: str) -> None:
    line = refused("--rehearse", "--out", str(tmp_path / "new"), f"--minutes={minutes}")
    assert line.endswith(f"argument --minutes: must be a number above zero, not {minutes}")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", ["/dev/null/x", "/etc/passwd"])
def test_a_folder_that_cannot_be_is_refused(path: str) -> None:
    assert f"--out {path}: " in refused("--rehearse", "--out", path)


def test_the_tests_of_a_gpu_do_not_pass_without_one() -> None:
    installed = f"{sys.prefix}/.dev-installed"
    done = subprocess.run(
        ["make", "--old-file", installed, f"VENV={sys.prefix}", "gpu"],
        cwd=REPOSITORY,
        env=NO_GPU,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("no GPU: nothing was tested\n")
    assert "skipped" not in done.stdout


def test_every_part_has_a_limit_and_all_fit_into_ten_minutes() -> None:
    assert sum(PARTS.values()) <= 600


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_everything_is_rehearsed(tmp_path: Path) -> None:
    """Every part's code, on a CPU; the tests of tests/gpu among them."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    for name in PARTS:
        values = {each["name"]: each["value"] for each in results_of(tmp_path / f"{name}.json")}
        assert len(values) > 2, name
        assert not [each for each in values.values() if str(each).startswith("failed")], name
        if name in ("kernels", "goldens"):
            assert values["tests that failed"] == 0
            assert values["tests that passed"] > 40
