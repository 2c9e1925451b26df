"""Servers on a GPU: the GPU is chosen by itself, steps are one ahead and in graphs, answers are those of a
CPU; with an 8-bit cache; and a model that cannot fit is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.gpu_device import DEVICE, GPU, REHEARSED
from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server
from setpoint_testing.tiny_models import TINY, write_tiny_llama

pytestmark = [*GPU, pytest.mark.e2e]

SAMPLING = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
PROMPTS = ["ab" * number for number in (1, 9, 40)]
STARTING_S = 300.0
"""A first start compiles every kernel."""


def write_model(folder: Path) -> Path:
    write_tiny_llama(
        folder,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        hidden_size=64,
        intermediate_size=96,
    )
    write_byte_tokenizer(folder)
    return folder


def answers(server: ServerProcess, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [
        server.generate(text=prompt, sampling_params=SAMPLING)["output_ids"] for prompt in prompts
    ]


def info_of(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json())


def options(folder: Path, device: str, *more: str) -> list[str]:
    return ["--model-path", str(folder), "--device", device, "--max-total-tokens", "2048", *more]


def test_the_gpu_is_taken_and_answers_like_the_cpu(tmp_path: Path) -> None:
    folder, found = write_model(tmp_path / "model"), []
    for chosen in ("auto", "cpu"):
        arguments = options(folder, chosen, "--dtype", "float32")
        with running_server(tmp_path / chosen, *arguments, ready=False) as server:
            server.wait_ready(timeout_s=STARTING_S)
            info = info_of(server)
            on_gpu = chosen == "auto" and not REHEARSED
            assert info["device"] == ("cuda" if on_gpu else "cpu")
            decisions = {each["field"]: each["value"] for each in info["decisions"]}
            assert decisions["overlap_depth"] == int(on_gpu)
            assert ("Capture target decode CUDA graph end." in server.errors) == on_gpu
            found.append(answers(server))
            if on_gpu:
                assert "cuda graph: True" in server.errors
            assert server.is_idle()
    assert found[0] == found[1]


def test_an_8_bit_cache_serves_many_at_once(tmp_path: Path) -> None:
    """Rows have the same bits in every batch only as far as their products do, which is not promised,
    so the same requests come again one by one."""
    arguments = options(
        write_model(tmp_path / "model"), DEVICE.type, "--kv-cache-dtype", "fp8_e4m3"
    )
    with running_server(tmp_path / "server", *arguments, ready=False) as server:
        server.wait_ready(timeout_s=STARTING_S)
        assert info_of(server)["kv_cache_dtype"] == "fp8_e4m3"
        with ThreadPoolExecutor(9) as pool:
            many = list(pool.map(lambda prompt: answers(server, [prompt]), PROMPTS * 3))
        assert {len(each) for (each,) in many} == {32}
        assert answers(server) == answers(server)
        assert server.is_idle()


def test_a_model_that_cannot_fit_is_refused_at_once(tmp_path: Path) -> None:
    """Some 400 GB, more than a GPU has."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 240}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **sizes, "torch_dtype": "bfloat16"}))
    arguments = options(tmp_path, DEVICE.type, "--load-format", "dummy", "--skip-tokenizer-init")
    with running_server(tmp_path / "server", *arguments, ready=False) as server:
        assert server.wait_end() == 1
        assert "does not fit into the memory" in server.errors
        assert "What would fit here" in server.errors
        assert "Traceback" not in server.errors
