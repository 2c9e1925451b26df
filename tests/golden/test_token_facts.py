"""Facts about tokens, from a real runner to the events: one for each output token, whatever happens
to the request on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.messages import Tokens
from setpoint.core.request import SAMPLING_MASK, unpack_ids
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint_testing.harness import Harness
from setpoint_testing.tiny_models import write_tiny_llama

PROMPT = [token % 120 + 3 for token in range(1, 30, 3)]
TOP_K = 5


def masks_of(folder: Path, *, retract: bool, **options: Any) -> tuple[list[int], list[list[int]]]:
    """The output ids and their sampling masks of a request that runs beside others."""
    engine = EngineConfig(
        str(folder), read_spec(folder), dtype="float32", kv_dtype="float32", num_threads=1
    )
    runner = build_runner(engine)
    runner.allocate(num_pages=200, max_slots=4, context_len=128)
    h = Harness(
        num_pages=200,
        executor=InprocExecutor(runner),
        vocab_size=131,
        max_req_len=127,
        max_req_input_len=120,
        max_running_requests=4,
        test_retract_interval=3 if retract else 0,
    )
    found: list[bytes] = []
    send = h.wire.send

    def watched(message: Any) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                found.extend(event.token_facts.get(SAMPLING_MASK, []))
        send(message)

    h.wire.send = watched  # type: ignore[method-assign]
    h.submit("other", [9, 9, 9], max_new_tokens=20)
    h.submit("a", PROMPT, max_new_tokens=12, token_facts=(SAMPLING_MASK,), **options)
    h.drain()
    return h.outcomes["a"].ids, [unpack_ids(each).tolist() for each in found]


@pytest.mark.parametrize("retract", [False, True])
def test_each_token_has_the_tokens_that_it_was_drawn_from(tmp_path: Path, retract: bool) -> None:
    folder = write_tiny_llama(tmp_path, max_position_embeddings=128)
    options = {"temperature": 1.0, "top_k": TOP_K, "seed": 7}
    ids, masks = masks_of(folder, retract=retract, **options)
    assert len(ids) == len(masks) == 12
    for token, mask in zip(ids, masks, strict=True):
        assert token in mask
        assert len(mask) == len(set(mask)) == TOP_K
    ids, masks = masks_of(folder, retract=retract, temperature=0.0)
    assert masks == [[token] for token in ids]
