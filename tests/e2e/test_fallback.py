"""An architecture without a declaration here, over HTTP: transformers' layers, everything else
ours."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
import torch

from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.library_goldens import THROUGH_TRANSFORMERS
from setpoint_testing.server_process import PATIENCE_S, ServerProcess, running_server

PROMPTS = ["Prefixes are shared. " * 6 + end for end in ("One.", "Two.", "And three.")]
ARGUMENTS = (
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--chunked-prefill-size",
    "32",
    "--max-total-tokens",
    "2048",
)
STABLELM = next(
    golden.config for golden in THROUGH_TRANSFORMERS if golden.config["model_type"] == "stablelm"
)


def test_greedy_text_over_http_equals_transformers(tmp_path: Path) -> None:
    from transformers import StableLmForCausalLM

    folder = write_tiny(tmp_path / "model", STABLELM)
    write_byte_tokenizer(folder)
    model = StableLmForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with running_server(tmp_path / "server", "--model-path", str(folder), *ARGUMENTS) as server:
        assert (
            "Fallback: model uses transformers (Setpoint has no model of its own for"
            " StableLmForCausalLM" in server.errors
        )
        assert (
            httpx.get(f"{server.url}/server_info", timeout=60).json()["model_impl"]
            == "transformers"
        )
        check(server, model)
        assert server.is_idle()


@pytest.mark.full
def test_compiled_steps_give_the_same_text_and_a_second_start_compiles_nothing(
    tmp_path: Path,
) -> None:
    from transformers import StableLmForCausalLM

    folder = write_tiny(tmp_path / "model", STABLELM)
    write_byte_tokenizer(folder)
    model = StableLmForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    flags, cache = (
        ("--enable-torch-compile", "--torch-compile-max-bs", "4"),
        {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )
    for num_reused in (0, 2):
        with running_server(
            tmp_path / f"server{num_reused}",
            "--model-path",
            str(folder),
            *ARGUMENTS,
            *flags,
            env=cache,
        ) as server:
            assert re.search(
                rf"torch\.compile: 2 graphs in [\d.]+ s, {num_reused} of them from the cache"
                rf" {tmp_path}/cache\n",
                server.errors,
            )
            assert re.search(
                r"torch\.compile: steps by number of tokens, without sampling: 1: [\d.]+ ms,"
                r" uncompiled ",
                server.errors,
            )
            check(server, model)
            assert "torch.compile is off from now on" not in server.errors


def check(server: ServerProcess, model: torch.nn.Module) -> None:
    """All prompts at once, then again out of the cache."""
    sampling = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    for num_cached in (0, 100):
        answers = server.generate(text=PROMPTS, sampling_params=sampling)
        for text, answer in zip(PROMPTS, answers, strict=True):
            ids = httpx.post(
                f"{server.url}/tokenize", json={"prompt": text}, timeout=PATIENCE_S
            ).json()["tokens"]
            with torch.inference_mode():
                for _ in range(20):
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            assert answer["output_ids"] == ids[-20:]
            assert answer["meta_info"]["cached_tokens"] >= num_cached
