"""The benchmark scripts run, write what they say, and never count a failure as throughput."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from setpoint.checkpoint.source import DEFAULT_PACKAGE

pytestmark = pytest.mark.full

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=550,  # below the limit of a test, and long enough for a machine that others use
        check=False,
    )


def test_servers_and_the_peer_are_measured(tmp_path: Path) -> None:
    done = run(
        "compare.py",
        *("--quick", "--name", "serving", "--results", str(tmp_path)),
        *("--contenders", "fp32,transformers", "--variant", "fp32=--dtype float32"),
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-serving.json")
    record = json.loads(path.read_text())
    for by_contender in record["samples"].values():
        assert by_contender.keys() == {"setpoint", "fp32", "transformers"}
        for samples in by_contender.values():
            assert all(sample["errors"] == [] for sample in samples)
    assert "(within the noise)" in done.stdout  # one repetition proves nothing


def test_a_failed_request_is_no_throughput(tmp_path: Path) -> None:
    done = run(
        "compare.py",
        *("--quick", "--results", str(tmp_path), "--only", "W1,W3"),
        *("--contenders", "short", "--variant", "short=--context-length 48"),
    )
    assert done.returncode == 1
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| short | as its"))
    _, _, _, first, decode, wall = row.rstrip(" |").split(" | ")
    assert "failed: RuntimeError: status 400" in wall
    assert "failed" not in first + decode


def test_frontend_prints_a_figure_per_load() -> None:
    load = ("--streams", "1,3", "--tokens", "20", "--step-ms", "1", "--open", "3")
    done = run("frontend.py", *load, "--only", "chat,generate")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("µs per token") for line in lines) == 14
    assert sum(": first tokens of " in line for line in lines) == 7


def test_scheduler_prints_its_table() -> None:
    done = run("scheduler.py", "--steps", "10", "--page-sizes", "64")
    assert done.returncode == 0, done.stderr
    for policy in ("fcfs", "dfs-weight", "priority"):
        assert f"{policy}, 2000 waiting, page size 64: decode" in done.stdout
    assert "ms (fcfs): " in done.stdout


def test_goldens_prints_its_table() -> None:
    done = run("goldens.py", "--only", "yarn", "--tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "| qwen3: yarn rope | setpoint | " in done.stdout
    assert "| 32 of 32 over 8 prompts | 0 | " in done.stdout
    assert "llama3 rope" not in done.stdout


def test_fallback_tells_what_works_and_why_not() -> None:
    """Over everything the installed transformers has: a table to the end, no traceback, and every
    refusal a sentence."""
    done = run("fallback.py")
    assert done.returncode == 0, done.stderr
    rows = dict(
        line.strip("| ").split(" | ", 1)
        for line in done.stdout.splitlines()
        if line.startswith("| ") and "ForCausalLM |" in line
    )
    assert {
        rows[f"{name}ForCausalLM"]
        for name in ("GPTNeoX", "Olmo2", "StableLm", "Granite", "Cohere", "Starcoder2", "Llama")
    } == {"works"}
    assert "recurrent state" in rows["Qwen3NextForCausalLM"]
    assert sum(words == "works" for words in rows.values()) > 50


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_running_requests", "`max_running_requests` 4 → 32: output "),
        ("enable_mixed_chunk", "`enable_mixed_chunk` false → true: longest pause of a stream "),
        ("page_size", "`--page-size` 1 → 64: prefix hits "),
    ],
)
def test_tuning_compares_two_settings(name: str, words: str, tmp_path: Path) -> None:
    """One comparison for each kind of load; two live ones, one with two servers."""
    done = run("tuning.py", "--quick", "--only", name, "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    (path,) = tmp_path.glob("*-tuning.json")
    (record,) = json.loads(path.read_text())["comparisons"]
    assert record["name"] == name
    for samples in record["samples"].values():
        assert [set(record["figures"]) <= set(sample) for sample in samples] == [True]


def test_tuning_measures_nothing_for_an_unknown_name(tmp_path: Path) -> None:
    done = run("tuning.py", "--only", "no-such-option", "--results", str(tmp_path))
    assert done.returncode == 1
    assert "no-such-option is none of" in done.stderr
    assert not list(tmp_path.iterdir())


def test_gguf_files_without_the_peers(tmp_path: Path) -> None:
    """They are rows with the reason; all parts have figures of Setpoint's."""
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    assert package is not None
    assert package.origin is not None
    (file,) = Path(package.origin).parent.glob("*.gguf")
    (tmp_path / "small-Q4_1.gguf").symlink_to(file)
    done = run(
        "ggufs.py",
        "--quick",
        "--files",
        "small-Q4_1",
        "--folder",
        str(tmp_path),
        "--peers-dir",
        str(tmp_path),
        "--name",
        "ggufs",
        "--results",
        str(tmp_path / "results"),
    )
    assert done.returncode == 1, done.stderr
    assert "ik_llama.cpp: skipped: not installed: python benchmarks/peers/install.py" in done.stdout
    for figure in ("W1 decode", "W2 output", "W4 prefill", "memory beside", "cold start", "tg8"):
        assert f"| small-Q4_1 | {figure}" in done.stdout
    (path,) = (tmp_path / "results").glob("*-ggufs.json")
    record = json.loads(path.read_text())["files"]["small-Q4_1"]
    assert set(record["start_s"]["cold"]) == set(record["memory"]) == {"setpoint", "setpoint int8"}
    for by_contender in record["samples"].values():
        for samples in by_contender.values():
            assert [sample["errors"] for sample in samples] == [[]]
