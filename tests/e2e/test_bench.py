"""The benchmarks against a real server and a real engine: their figures agree with what the server
itself says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from setpoint import cli
from setpoint.bench.prompt_sets import make_prompts
from setpoint.config.bench import OfflineOptions, ServingOptions
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.server_process import PATIENCE_S, ServerProcess


def test_serving_agrees_with_the_server(
    tiny: ServerProcess, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same ids, sent by the benchmark and then by hand: the same lengths and texts."""
    out = tmp_path / "out.jsonl"
    shape = [
        "--num-prompts",
        "8",
        "--random-input-len",
        "48",
        "--random-output-len",
        "16",
        "--seed",
        "5",
    ]
    given = [
        "--base-url",
        tiny.url,
        *shape,
        "--output-file",
        str(out),
        "--output-details",
        "--cache-report",
        "--max-concurrency",
        "4",
        "--tokenize-prompt",
    ]
    assert cli.main(["bench", "serving", *given]) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    options = ServingOptions(num_prompts=8, random_input_len=48, random_output_len=16, seed=5)
    prompts = make_prompts(options, Tokenizer.from_folder(tiny_model), as_ids=True)
    sampling = [
        {"temperature": 0, "max_new_tokens": prompt.output_len, "ignore_eos": True}
        for prompt in prompts
    ]
    by_hand = [
        tiny.generate(input_ids=prompt.content, sampling_params=each)
        for prompt, each in zip(prompts, sampling, strict=True)
    ]
    assert result["generated_texts"] == [answer["text"] for answer in by_hand]
    assert result["output_lens"] == [answer["meta_info"]["completion_tokens"] for answer in by_hand]
    assert result["input_lens"] == [answer["meta_info"]["prompt_tokens"] for answer in by_hand]
    assert result["total_output_tokens"] == sum(prompt.output_len for prompt in prompts)
    assert result["max_concurrent_requests"] <= 4
    for length, ttft, itls in zip(
        result["output_lens"], result["ttfts"], result["itls"], strict=True
    ):
        assert len(itls) == length - 1
        assert 0 < ttft + sum(itls) <= result["duration"]
    assert 0 < result["client_cpu_share"] < 1.5
    assert (
        httpx.get(f"{tiny.url}/server_info", timeout=PATIENCE_S).json()["internal_states"][0][
            "num_running"
        ]
        == 0
    )
    printed = capsys.readouterr().out
    assert f"Output token throughput (tok/s):         {result['output_throughput']:.2f}" in printed


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "setpoint.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_offline_counts_what_was_asked(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    shape = {"num_prompts": 8, "random_input_len": 48, "random_output_len": 16}
    flags = [
        word
        for name, value in shape.items()
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    done = bench(
        "offline", str(tiny_model), "--dtype", "float32", *flags, "--output-file", str(out)
    )
    assert done.returncode == 0, done.stderr
    (result,) = map(json.loads, out.read_text().splitlines())
    prompts = make_prompts(OfflineOptions(**shape), Tokenizer.from_folder(tiny_model))
    assert (result["successful_requests"], result["failed"]) == (8, 0)
    assert result["total_input_tokens"] == sum(prompt.num_tokens for prompt in prompts)
    assert result["total_output_tokens"] == sum(prompt.output_len for prompt in prompts)
    assert result["total_cached_tokens"] == 0
    assert result["output_throughput"] == pytest.approx(
        result["total_output_tokens"] / result["total_latency"]
    )
    assert "Successful requests:                     8\n" in done.stdout


@pytest.mark.full
def test_one_batch_times_every_combination(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lists = "--batch-size 1 3 --input-len 8 70 --output-len 5 --chunked-prefill-size 64"
    options = f"--dtype float32 {lists} --breakdown --output-file {out}"
    done = bench("one-batch", str(tiny_model), *options.split())
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["batch_size"], row["input_len"], row["output_len"]) for row in rows] == [
        (1, 8, 5),
        (1, 70, 5),
        (3, 8, 5),
        (3, 70, 5),
    ]
    for row in rows:
        assert (len(row["prefill_latencies"]), len(row["decode_latencies"])) == (3, 4)
        assert min(row["prefill_latencies"] + row["decode_latencies"]) > 0
        assert row["median_decode_throughput"] == pytest.approx(
            row["batch_size"] / row["median_decode_latency"]
        )
        assert (row["chunk_tokens"], row["dtype"]) == (64, "float32")
        for phase in ("prefill", "decode"):
            parts = row["breakdown"][phase]["parts"]
            seconds = {name: part["seconds"] for name, part in parts.items()}
            assert set(seconds) == {
                "linear",
                "head",
                "attention",
                "elementwise",
                "sampling",
                "rest",
                "scheduling",
                "messages",
                "step",
            }
            assert min(seconds.values()) > 0
            assert seconds["step"] == pytest.approx(sum(seconds.values()) - seconds["step"])
            assert parts["linear"]["bound_s"] > 0
            assert row["breakdown"][phase]["engine_s"] > 0
        assert row["limits"]["flops"].keys() == {"float32"}
    assert done.stdout.count("| linear layers |") == 2 * 4
    refused = bench("one-batch", str(tiny_model), "--input-len", "4096")
    assert refused.returncode == 2
    assert "add up to 4112, more than the context of 4096 tokens" in refused.stderr
