"""The quality benchmark on real engines: the same model is no change, fp32 is close to bf16, a
damaged model is far from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from setpoint import Engine
from setpoint.bench.divergence import compare
from setpoint.bench.engines.quality import cut_windows, measure
from setpoint.frontend.text.tokenizer import Tokenizer
from setpoint_testing.server_process import PATIENCE_S, ServerProcess

TEXT = "The quick brown fox jumps over the lazy dog; 12 boxing wizards, 34 quartz sphinxes. " * 6


class Served:
    """A running server as an Engine."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def generate(self, **request: Any) -> Any:
        return self._server.generate(**request)

    def get_server_info(self) -> Any:
        return httpx.get(f"{self._server.url}/server_info", timeout=PATIENCE_S).json()


def test_a_damaged_model_is_much_worse(
    tiny: ServerProcess, tiny_model: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model, damaged)
    path = damaged / "model.safetensors"
    weights = load_file(path)
    weights |= {
        name: np.flip(weight, 0).copy()
        for name, weight in weights.items()
        if name.endswith("down_proj.weight")
    }
    save_file(weights, path, {"format": "pt"})
    windows, prefix = cut_windows({"mine.txt": TEXT}, Tokenizer.from_folder(tiny_model), 256)
    prompts = windows.prompts(prefix)
    reference = measure(Served(tiny), windows, prompts, name="reference")
    with Engine(str(damaged), dtype="float32") as engine:
        result = compare(windows, reference, measure(engine, windows, prompts, name="candidate"))
    assert result["mean_abs_logprob_change"] > 0.5
    assert result["greedy_agreement"] < 0.5
    assert result["top1_agreement"] < 0.5


@pytest.mark.full
def test_the_command_compares_with_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "out.jsonl"
    text.write_text(TEXT)
    given = [
        "--dtype",
        "float32",
        "--text-file",
        str(text),
        "--output-file",
        str(out),
        "--max-perplexity-change",
        "0",
    ]
    command = [sys.executable, "-m", "setpoint.cli", "bench", "quality", str(tiny_model), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    (result,) = map(json.loads, out.read_text().splitlines())
    assert done.returncode == (3 if result["perplexity_change"] > 0 else 0), done.stderr
    assert (result["reference"]["dtype"], result["candidate"]["dtype"]) == ("bfloat16", "float32")
    assert (result["reference"]["quantization"], result["candidate"]["quantization"]) == (
        "unquant",
        None,
    )
    assert result["by_text"].keys() == {"mine.txt"}
    assert len(TEXT) - 2 <= result["num_tokens"] <= len(TEXT)
    assert 0 < result["mean_abs_logprob_change"] < 0.05
    assert abs(result["perplexity_change"]) < 0.01
    assert result["top1_agreement"] > 0.9
    assert "| mine.txt |" in done.stdout
    assert "candidate: dtype float32" in done.stdout
