"""Embeddings of a tiny random model against transformers' last hidden states pooled by hand,
however the work is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from setpoint.checkpoint.pooling import read_pooling
from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.layers.linear import NoHead
from setpoint_testing.harness import Harness
from setpoint_testing.tiny_models import write_tiny_llama

PAGE, CONTEXT = 4, 128
RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, 131, 24).tolist()
PROMPTS = {
    f"r{length}": SHARED[: length // 2] + RNG.integers(3, 131, length - length // 2).tolist()
    for length in (1, 2, 9, 31, 48)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    from transformers import LlamaModel

    model = LlamaModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found: dict[str, dict[str, np.ndarray]] = {"last": {}, "mean": {}}
    with torch.inference_mode():
        for rid, prompt in PROMPTS.items():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
            found["last"][rid], found["mean"][rid] = (
                hidden[-1].numpy(),
                hidden.double().mean(0).float().numpy(),
            )
    return found


def harness(folder: Path, dtype: str, device: str, **settings: object) -> Harness:
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE,
        num_threads=1,
        device=device,
    )
    return harness_of(config, **settings)


def harness_of(config: EngineConfig, **settings: object) -> Harness:
    runner = build_runner(config)
    runner.allocate(num_pages=4 * CONTEXT // PAGE, max_slots=8, context_len=CONTEXT)
    return Harness(
        executor=InprocExecutor(runner),
        num_pages=4 * CONTEXT // PAGE,
        page_size=PAGE,
        vocab_size=131,
        **settings,
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("dtype", "chunk", "cache", "depth"),
    [
        ("float32", None, True, 0),
        ("float32", 8, False, 0),
        ("float64", 4, True, 0),
        ("float64", 12, True, 1),
    ],
)
def test_vectors_equal_transformers(
    folder: Path,
    wanted: dict[str, dict[str, np.ndarray]],
    pooling: str,
    dtype: str,
    chunk: int | None,
    cache: bool,
    depth: int,
    device: str,
) -> None:
    """Twice over, so that the second round finds every prefix cached; with a text request in the
    same steps."""
    h = harness(
        folder,
        dtype,
        device,
        chunked_prefill_size=chunk,
        mixed_chunk=True,
        cache_enabled=cache,
        depth=depth,
    )
    h.submit("text", SHARED, max_new_tokens=40)
    h.turn(2)
    for again in ("", "again-"):
        for rid, prompt in PROMPTS.items():
            h.submit(again + rid, prompt, pooling=pooling, max_new_tokens=0)
        h.drain()
        for rid in PROMPTS:
            found = np.frombuffer(h.outcomes[again + rid].embedding, "<f4")
            np.testing.assert_allclose(
                found, wanted[pooling][rid], rtol=0, atol=2e-5, err_msg=again + rid
            )
    cached = h.outcomes["again-r48"].num_cached
    assert cached == (44 if cache and pooling == "last" else 0)
    assert len(h.outcomes["text"].ids) == 40


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", ["bare", "with a head"])
def test_checkpoints_of_bare_decoders(tmp_path: Path, names: str, tied: bool) -> None:
    """Embedding models are published in this form: the decoder's class, tensor names without
    "model.", no head; or with one, which is not read."""
    from transformers import LlamaForCausalLM

    write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    with torch.inference_mode():
        wanted = (
            LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            .model(torch.tensor([PROMPTS["r31"]]))
            .last_hidden_state[0, -1]
        )
    if names == "bare":
        path = tmp_path / "model.safetensors"
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in load_file(path).items()
            if not name.startswith("lm_head")
        }
        save_file(tensors, path, {"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "architectures": ["LlamaModel"]})
        )
    spec = read_spec(tmp_path)
    spec = replace(spec, pooling=read_pooling(tmp_path, spec))
    h = harness_of(
        EngineConfig(
            str(tmp_path), spec, dtype="float32", kv_dtype="float32", page_size=PAGE, num_threads=1
        )
    )
    h.submit("r", PROMPTS["r31"], pooling="last", max_new_tokens=0)
    h.drain()
    np.testing.assert_allclose(
        np.frombuffer(h.outcomes["r"].embedding, "<f4"), wanted, rtol=0, atol=2e-5
    )
    assert isinstance(h.executor.runner.model.lm_head, NoHead)


def test_an_abort_or_a_retraction_in_mid_prompt_leaves_no_sum_behind(
    folder: Path, wanted: dict[str, dict[str, np.ndarray]], device: str
) -> None:
    h = harness(folder, "float32", device, chunked_prefill_size=8, max_running_requests=1)
    h.submit("gone", PROMPTS["r48"], pooling="mean", max_new_tokens=0)
    h.turn(3)
    h.abort("gone")
    h.submit("r31", PROMPTS["r31"], pooling="mean", max_new_tokens=0)
    h.turn(2)
    assert h.sequence("r31").slot == 0, "the slot that the aborted one had"
    h.scheduler.state.send_back(h.sequence("r31"))
    h.drain()
    assert h.outcomes["r31"].num_retractions == 1
    np.testing.assert_allclose(
        np.frombuffer(h.outcomes["r31"].embedding, "<f4"), wanted["mean"]["r31"], rtol=0, atol=2e-5
    )
