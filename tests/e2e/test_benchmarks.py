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
        timeout=170,
        check=False,
    )


def test_serving_measures_us_and_the_peer(tmp_path: Path) -> None:
    done = run(
        "serving.py",
        "--quick",
        "--name",
        "serving",
        "--results",
        str(tmp_path),
        "--variant",
        "fp32=--dtype float32",
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-serving.json")
    record = json.loads(path.read_text())
    assert set(record["samples"]["W1"]) == {"setpoint", "fp32", "transformers"}
    assert set(record["samples"]["W3"]) == {"setpoint", "fp32", "setpoint, no radix cache"}
    for by_contender in record["samples"].values():
        for samples in by_contender.values():
            assert [sample["errors"] for sample in samples] == [[]]
    assert "| W2: 8 × (16 in, 8 out) | output, tok/s | setpoint |" in done.stdout
    assert "(within the noise)" in done.stdout  # one repetition proves nothing


def test_a_failed_request_is_no_throughput(tmp_path: Path) -> None:
    done = run(
        "serving.py",
        "--quick",
        "--results",
        str(tmp_path),
        "--only",
        "W1,W3",
        "--no-peer",
        "--server-args",
        "--context-length 48",
    )
    assert done.returncode == 1
    assert (
        "| W3: 8 × (64 shared + 8 own in, 4 out) | output, tok/s | setpoint | failed |"
        in done.stdout
    )
    assert "FAILED W3 setpoint: RuntimeError: status 400" in done.stderr
    assert "| W1: one stream, 16 in, 8 out | decode, tok/s | setpoint | failed |" not in done.stdout


def test_serving_beside_the_engine_without_http(tmp_path: Path) -> None:
    done = run(
        "serving.py",
        "--quick",
        "--offline",
        "--name",
        "offline",
        "--results",
        str(tmp_path),
        "--only",
        "W1,W4",
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-offline.json")
    samples = json.loads(path.read_text())["samples"]
    assert set(samples["W1"]) == {"setpoint", "setpoint, offline"}
    assert set(samples["W4"]) == {"setpoint", "setpoint, streaming", "setpoint, offline"}
    assert all(
        sample["cpu_s"]["engine"] > 0 and not sample["errors"]
        for by in samples.values()
        for each in by.values()
        for sample in each
    )


def test_frontend_prints_a_figure_per_load() -> None:
    load = ("--streams", "1,3", "--tokens", "20", "--step-ms", "1", "--open", "3")
    done = run("frontend.py", *load, "--only", "chat,generate")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.endswith("µs per token") for line in lines) == 12
    assert sum(": first tokens of " in line for line in lines) == 6


def test_policies_reports_prefix_hits(tmp_path: Path) -> None:
    done = run("policies.py", "--quick", "--name", "policies", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-policies.json")
    samples = json.loads(path.read_text())["samples"]["P1"]
    assert set(samples) == {"fcfs", "lpm"}
    assert samples["lpm"][0]["cached_tokens"] >= 4 * 32, "each group computes its prefix once"
    assert "| prefix hits, % of prompt tokens | lpm |" in done.stdout


def test_stalls_prints_a_row_for_each_contender(tmp_path: Path) -> None:
    done = run(
        "stalls.py",
        "--quick",
        "--name",
        "stalls",
        "--results",
        str(tmp_path),
        "--variant",
        "mixed=--enable-mixed-chunk",
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*-stalls.json")
    samples = json.loads(path.read_text())["samples"]
    assert samples.keys() == {"setpoint", "mixed"}
    for (sample,) in samples.values():
        assert 30 < len(sample["gaps_s"]) <= 46, "on a busy machine some tokens come together"
    assert "| mixed | " in done.stdout


def test_stalls_of_a_server_that_refuses_are_no_figures(tmp_path: Path) -> None:
    done = run(
        "stalls.py", "--quick", "--results", str(tmp_path), "--server-args", "--context-length 300"
    )
    assert done.returncode == 1
    assert "FAILED: status 400" in done.stderr


def test_scheduler_prints_its_table() -> None:
    done = run("scheduler.py", "--steps", "10", "--page-sizes", "64")
    assert done.returncode == 0, done.stderr
    for policy in ("fcfs", "dfs-weight", "priority"):
        assert f"{policy}, 2000 waiting, page size 64: decode" in done.stdout
    assert "aim <= 24 bytes per cached token: met" in done.stdout


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


def test_batch_counts_every_answer_and_times_both_ways(tmp_path: Path) -> None:
    done = run("batch.py", "--quick", "--name", "batch", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "killed 2 times, with [" in done.stdout
    assert "every request answered exactly once" in done.stdout
    assert "aim: batch ≥ 95% of the server's throughput" in done.stdout
    (path,) = tmp_path.glob("*-batch.json")
    record = json.loads(path.read_text())
    assert record["killed"]["wrong"] == []
    assert [len(walls) for walls in record["wall_s"].values()] == [1, 1]


def test_formats_of_calls() -> None:
    done = run("formats.py", "--pieces", "100")
    assert done.returncode == 0, done.stderr
    assert "calls: hermes" in done.stdout


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
