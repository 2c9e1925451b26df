"""A server on a GPU: chosen by itself, one step ahead, and with the answers of a CPU."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from setpoint_testing.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, write_byte_tokenizer
from setpoint_testing.server_process import PATIENCE_S, running_server
from setpoint_testing.tiny_models import write_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device")
def test_the_gpu_is_taken_and_answers_like_the_cpu(tmp_path: Path) -> None:
    folder = write_tiny_llama(
        tmp_path / "model", vocab_size=VOCAB_SIZE, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
    write_byte_tokenizer(folder)
    answers = []
    for chosen in ("auto", "cpu"):
        options = [
            "--model-path",
            str(folder),
            "--dtype",
            "float64",
            "--device",
            chosen,
            "--max-total-tokens",
            "2048",
        ]
        with running_server(tmp_path / chosen, *options) as server:
            info = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
            assert info["device"] == ("cuda" if chosen == "auto" else "cpu")
            depth = 1 if chosen == "auto" else 0
            assert {each["field"]: each["value"] for each in info["decisions"]}[
                "overlap_depth"
            ] == depth
            sampling = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}
            answers.append(
                [
                    server.generate(text="ab" * number, sampling_params=sampling)["output_ids"]
                    for number in (1, 9, 40)
                ]
            )
            assert server.is_idle()
    assert answers[0] == answers[1]
