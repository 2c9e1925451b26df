"""Embeddings of a tiny random model against transformers' last hidden states pooled by hand, however the work is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.testing.harness import Harness
from setpoint.testing.tiny_models import write_tiny_llama

PAGE, CONTEXT = 4, 128
RNG = np.random.default_rng(3)
SHARED = RNG.integers(3, 131, 24).tolist()
PROMPTS = {f"r{length}": SHARED[: length // 2] + RNG.integers(3, 131, length - length // 2).tolist() for length in (1, 2, 9, 31, 48)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    from transformers import LlamaModel

    model = LlamaModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[str, dict[str, np.ndarray]] = {"last": {}, "mean": {}}
    with torch.inference_mode():
        for rid, prompt in PROMPTS.items():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0]
            found["last"][rid], found["mean"][rid] = hidden[-1].numpy(), hidden.double().mean(0).float().numpy()
    return found


def harness(folder: Path, dtype: str, **config: object) -> Harness:
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), dtype=dtype, kv_dtype=dtype, page_size=PAGE, num_threads=1))
    runner.allocate(num_pages=4 * CONTEXT // PAGE, max_slots=8, context_len=CONTEXT)
    return Harness(executor=InprocExecutor(runner), num_pages=4 * CONTEXT // PAGE, page_size=PAGE, vocab_size=131, **config)


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("dtype", "chunk", "cache"), [("float32", None, True), ("float32", 8, False), ("float64", 4, True), ("float64", 12, True)]
)
def test_vectors_equal_transformers(
    folder: Path, wanted: dict[str, dict[str, np.ndarray]], pooling: str, dtype: str, chunk: int | None, cache: bool
) -> None:
    """Twice over, so that the second round finds every prefix cached; with a text request in the same steps."""
    h = harness(folder, dtype, chunked_prefill_size=chunk, mixed_chunk=True, cache_enabled=cache)
    h.submit("text", SHARED, max_new_tokens=40)
    h.turn(2)
    for again in ("", "again-"):
        for rid, prompt in PROMPTS.items():
            h.submit(again + rid, prompt, pooling=pooling, max_new_tokens=0)
        h.drain()
        for rid in PROMPTS:
            found = np.frombuffer(h.outcomes[again + rid].embedding, "<f4")
            np.testing.assert_allclose(found, wanted[pooling][rid], rtol=0, atol=2e-5, err_msg=again + rid)
    cached = h.outcomes["again-r48"].num_cached
    assert cached == (44 if cache and pooling == "last" else 0)
    assert len(h.outcomes["text"].ids) == 40
