"""Requests for embeddings: one prompt, no tokens; computed in chunks, from cached prefixes or not,
retracted, aborted."""

from __future__ import annotations

import numpy as np
import pytest

from setpoint_testing.harness import VOCAB, Harness
from setpoint_testing.scripted import ScriptedExecutor, hashed_token

PROMPT = list(range(1, 24))


def embedding_of(h: Harness, rid: str) -> list[float]:
    outcome = h.outcomes[rid]
    assert outcome.finish is not None
    assert (outcome.finish.type, outcome.finish.length) == ("length", 0)
    assert outcome.ids == []
    assert outcome.num_events == 1
    return np.frombuffer(outcome.embedding, "<f4").tolist()


def wanted(prompt: list[int]) -> list[float]:
    return [len(prompt), float(np.float32(hashed_token(VOCAB)(np.array(prompt, np.int32))))]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [None, 4, 23])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_embedding_is_of_the_whole_prompt(pooling: str, chunk: int | None, depth: int) -> None:
    h = Harness(chunked_prefill_size=chunk, depth=depth)
    h.submit("a", PROMPT, pooling=pooling, max_new_tokens=0)
    h.submit("b", PROMPT[:9], pooling=pooling, max_new_tokens=0)
    h.drain()
    assert embedding_of(h, "a") == wanted(PROMPT)
    assert embedding_of(h, "b") == wanted(PROMPT[:9])
    assert not any(plan.rows.samples.any() for plan in h.plans)


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 22), ("mean", 0)])
def test_only_a_last_token_may_stand_on_a_cached_prefix(pooling: str, num_cached: int) -> None:
    h = Harness()
    for rid in ("first", "second"):
        h.submit(rid, PROMPT, pooling=pooling, max_new_tokens=0)
        h.drain()
    assert embedding_of(h, "second") == embedding_of(h, "first") == wanted(PROMPT)
    assert h.outcomes["second"].num_cached == num_cached


def test_the_prompt_of_a_mean_serves_others_as_a_prefix() -> None:
    h = Harness()
    h.submit("mean", PROMPT, pooling="mean", max_new_tokens=0)
    h.submit("last", PROMPT, pooling="last", max_new_tokens=0)
    h.drain()
    assert h.outcomes["last"].num_cached == 22
    assert embedding_of(h, "last") == wanted(PROMPT)


@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_in_mid_prompt_leaves_nothing_behind(depth: int) -> None:
    h = Harness(chunked_prefill_size=4, depth=depth, max_running_requests=1)
    h.submit("gone", [7] * 23, pooling="mean", max_new_tokens=0)
    h.turn(2)
    h.abort("gone")
    h.submit("next", PROMPT, pooling="mean", max_new_tokens=0)
    h.drain()
    assert h.outcomes["gone"].embedding == b""
    assert embedding_of(h, "next") == wanted(PROMPT)


def test_a_retraction_in_mid_prompt_starts_over() -> None:
    h = Harness(chunked_prefill_size=4)
    h.submit("a", PROMPT, pooling="mean", max_new_tokens=0)
    h.turn(2)
    h.scheduler.state.send_back(h.sequence("a"))
    h.drain()
    assert h.outcomes["a"].num_retractions == 1
    assert embedding_of(h, "a") == wanted(PROMPT)


def test_embeddings_and_text_share_a_step() -> None:
    h = Harness(mixed_chunk=True, chunked_prefill_size=8)
    h.submit("text", [1, 2, 3], max_new_tokens=5)
    h.submit("vector", PROMPT, pooling="mean", max_new_tokens=0)
    h.drain()
    assert len(h.outcomes["text"].ids) == 5
    assert embedding_of(h, "vector") == wanted(PROMPT)


def test_numbers_that_are_not_finite_are_an_error() -> None:
    class Broken(ScriptedExecutor):
        def submit(self, plan):  # type: ignore[no-untyped-def]
            step = super().submit(plan)
            step._embeddings = {key: vector * np.nan for key, vector in step._embeddings.items()}
            return step

    h = Harness(executor=Broken(num_pages=64, page_size=1, next_token=hashed_token(VOCAB)))
    h.submit("a", PROMPT, pooling="last", max_new_tokens=0)
    h.drain()
    finish = h.outcomes["a"].finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 500)
    assert h.outcomes["a"].embedding == b""
