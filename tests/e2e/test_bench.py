"""The benchmarks against a real server and a real engine: their figures agree with what the server itself says."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from setpoint import cli
from setpoint.bench.prompts import make_prompts
from setpoint.config.bench import ServingOptions
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint.testing.server import ServerProcess


def test_serving_agrees_with_the_server(tiny: ServerProcess, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same ids, sent by the benchmark and then by hand: the same lengths and texts."""
    out = tmp_path / "out.jsonl"
    shape = ["--num-prompts", "8", "--random-input-len", "48", "--random-output-len", "16", "--seed", "5"]
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
    sampling = [{"temperature": 0, "max_new_tokens": prompt.output_len, "ignore_eos": True} for prompt in prompts]
    by_hand = [tiny.generate(input_ids=prompt.content, sampling_params=each) for prompt, each in zip(prompts, sampling, strict=True)]
    assert result["generated_texts"] == [answer["text"] for answer in by_hand]
    assert result["output_lens"] == [answer["meta_info"]["completion_tokens"] for answer in by_hand]
    assert result["input_lens"] == [answer["meta_info"]["prompt_tokens"] for answer in by_hand]
    assert result["total_output_tokens"] == sum(prompt.output_len for prompt in prompts)
    assert result["max_concurrent_requests"] <= 4
    for length, ttft, itls in zip(result["output_lens"], result["ttfts"], result["itls"], strict=True):
        assert len(itls) == length - 1
        assert 0 < ttft + sum(itls) <= result["duration"]
    assert 0 < result["client_cpu_share"] < 1.5
    assert httpx.get(f"{tiny.url}/server_info").json()["internal_states"][0]["num_running"] == 0
    printed = capsys.readouterr().out
    assert f"Output token throughput (tok/s):         {result['output_throughput']:.2f}" in printed
