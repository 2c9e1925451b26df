"""A mixture of experts behind a real server."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.server_process import PATIENCE_S, running_server

BROKEN_ID = 77
"""A token whose scores of all experts are infinite, so that their shares are NaN. Weights that are
NaN themselves are refused at the start."""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe: three of eight experts",
        "gpt_oss: yarn as it is released, two of six experts",
    ],
)
def test_a_router_without_an_answer_fails_one_request(tmp_path: Path, name: str) -> None:
    golden = next(each for each in GOLDENS if each.name == name)
    model = write_tiny(tmp_path / "model", golden.config)
    write_byte_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    # The first dimension is zero for every other token up to the first router, whose weight is huge.
    tensors["model.embed_tokens.weight"][:, 0] = 0.0
    tensors["model.embed_tokens.weight"][BROKEN_ID, 0] = 100.0
    for each, values in tensors.items():
        if each.startswith("model.layers.0.self_attn.o_proj."):
            values[0] = 0.0
        if each in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.router.weight"):
            values[:, 0] = 3e38
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}

    arguments = "--model-path", str(model), "--dtype", "float32", "--enable-metrics"
    with running_server(tmp_path, *arguments) as server:

        def ask(ids: list[int]) -> tuple[int, dict[str, Any]]:
            answer = httpx.post(
                f"{server.url}/generate",
                json={"input_ids": ids, "sampling_params": sampling},
                timeout=PATIENCE_S,
            )
            return answer.status_code, answer.json()

        good = [[1, 2, 3 + index] for index in range(6)]
        alone = [ask(ids) for ids in good]
        with ThreadPoolExecutor(12) as pool:
            answers = list(
                pool.map(ask, [each for ids in good for each in (ids, [*ids, BROKEN_ID])])
            )
        for (status, answer), (_, expected) in zip(answers[::2], alone, strict=True):
            assert (status, answer["output_ids"]) == (200, expected["output_ids"])
        for status, answer in answers[1::2]:
            assert (status, answer["message"]) == (500, "NaN happened")
        failed = [line for line in server.messages if line.endswith("answered 500: NaN happened")]
        assert len(failed) == len(good)
        metrics = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        (ended,) = re.findall(r'setpoint:ended_requests_total{.*how="500".*} (\d+)', metrics)
        assert int(ended) == len(good)
