"""Hidden states of a real runner: those of the transformers library, and the same bits however the
step runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from setpoint.checkpoint.spec import read_spec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint_testing.harness import Harness
from setpoint_testing.tiny_models import TINY, write_tiny_llama

PROMPT = [token % 120 + 3 for token in range(1, 60, 3)]
PAGES, SIZE = 200, TINY["hidden_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=128)


def generated(folder: Path, *, capture: bool, **config: Any) -> tuple[list[int], Any]:
    """The output ids and the hidden states of a request that runs beside others."""
    engine = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype="float32",
        kv_dtype="float32",
        num_threads=1,
        capture=capture,
    )
    runner = build_runner(engine)
    runner.allocate(num_pages=PAGES, max_slots=4, context_len=128)
    h = Harness(
        num_pages=PAGES,
        executor=InprocExecutor(runner),
        vocab_size=131,
        max_req_len=127,
        max_req_input_len=120,
        max_running_requests=4,
        **config,
    )
    h.submit("other", [9, 9, 9], max_new_tokens=20, temperature=0.0)
    h.turn(2)
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    h.submit("a", PROMPT, hidden_states=True, **options)
    h.submit("b", PROMPT, hidden_states=True, **options)
    h.drain()
    assert h.outcomes["other"].hidden_states == []
    assert h.outcomes["a"].hidden_states == h.outcomes["b"].hidden_states
    states = np.array(h.outcomes["a"].hidden_states, np.float32).reshape(-1, SIZE)
    return h.outcomes["a"].ids, states


def test_they_are_the_library_s(folder: Path) -> None:
    ids, states = generated(folder, capture=False)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        tokens = torch.tensor([[*PROMPT, *ids[:-1]]])
        wanted = model.model(input_ids=tokens).last_hidden_state[0].numpy()
    assert states.shape == wanted.shape
    np.testing.assert_allclose(states, wanted, rtol=2e-3, atol=2e-3)


def test_they_do_not_depend_on_the_way_or_on_chunks(folder: Path) -> None:
    ids, eager = generated(folder, capture=False)
    for config in ({"capture": True}, {"capture": False, "chunked_prefill_size": 8}):
        same_ids, states = generated(folder, **config)
        assert same_ids == ids
        np.testing.assert_allclose(states, eager, rtol=1e-4, atol=1e-4)
