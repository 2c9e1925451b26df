"""Quantised folders behind a real server: its answers, what it says of its weights, live updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.quantised_folders import FORMATS, quantise
from setpoint_testing.server_process import PATIENCE_S, running_server

CONFIG = next(each.config for each in GOLDENS if each.config["model_type"] == "llama") | {
    "hidden_size": 64,
    "intermediate_size": 128,
}
ASK = {
    "input_ids": [5, 6, 7, 8],
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}


def outcome(folder: Path, to: Path, *arguments: str, update: bool = False) -> dict[str, Any]:
    """The server's answer, before and after an update, and its description of the weights."""
    to.mkdir()
    update_arguments = ("--update-weights-folder", str(folder.parent)) if update else ()
    with running_server(to, "--model-path", str(folder), *arguments, *update_arguments) as server:

        def post(path: str, body: dict[str, Any]) -> Any:
            answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            return answer.json()

        ids = post("/generate", ASK)["output_ids"]
        info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
        if update:
            post("/update_weights_from_disk", {"model_path": str(folder)})
            assert post("/generate", ASK)["output_ids"] == ids
        return {"ids": ids, "weights": info["weights"], "quantization": info["quantization"]}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("form", "name"),
    [("awq", "awq_marlin"), ("nf4 nested", "bitsandbytes")],
)
def test_a_folder_is_served_as_its_dequantised_model(tmp_path: Path, form: str, name: str) -> None:
    model = write_tiny(tmp_path / "model", CONFIG)
    quantised, plain = quantise(model, tmp_path, form)
    for folder in (quantised, plain):
        write_byte_tokenizer(folder)
    theirs = outcome(plain, tmp_path / "1")
    found = outcome(quantised, tmp_path / "2", "--quantization", name, update=True)
    assert found["ids"] == theirs["ids"]
    assert found["quantization"] is None
    kind = FORMATS[form][2]
    expected = (
        f"{kind} matrices in blocks of the folder's codes" if kind else "are dequantized to bfloat"
    )
    assert expected in found["weights"]
