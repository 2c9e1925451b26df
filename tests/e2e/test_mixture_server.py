"""A mixture of experts behind a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from setpoint.testing.against_transformers import write_tiny
from setpoint.testing.byte_tokenizer import write_byte_tokenizer
from setpoint.testing.goldens import GOLDENS
from setpoint.testing.server_process import PATIENCE_S, running_server

BROKEN_ID = 77
"""A token whose embedding is NaN, and so are its scores of all experts."""


@pytest.mark.parametrize(
    "name",
    ["qwen3_moe: three of eight experts", "gpt_oss: yarn as it is released, two of six experts"],
)
def test_a_router_without_an_answer_fails_one_request(tmp_path: Path, name: str) -> None:
    golden = next(each for each in GOLDENS if each.name == name)
    model = write_tiny(tmp_path / "model", golden.config)
    write_byte_tokenizer(model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN_ID] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}

    with running_server(tmp_path, "--model-path", str(model), "--dtype", "float32") as server:

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
