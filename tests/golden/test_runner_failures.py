"""A request whose parameters cannot be read, or that cannot be sampled, fails alone: the others get
the tokens they get without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from setpoint.checkpoint.spec import read_spec
from setpoint.core.request import LogprobOptions
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner import model_runner, rows
from setpoint_testing.harness import Harness, Outcome
from setpoint_testing.tiny_models import write_tiny_llama

PAGE, CONTEXT = 4, 64
PROMPT = [7] * 9
POISON = 0.321
"""The temperature of the request that fails."""
HEALTHY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "told": {"temperature": 0.0, "logprobs": LogprobOptions(0, 2, (5, 6))},
    "biased": {
        "temperature": 0.5,
        "seed": 4,
        "logit_bias": {9: 3.0},
        "frequency_penalty": 0.5,
    },
}
BAD: dict[str, Any] = {
    "temperature": POISON,
    "logprobs": LogprobOptions(0, 7),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Outcome]]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))

    def run(depth: int, requests: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
        runner = build_runner(
            EngineConfig(
                str(folder),
                read_spec(folder),
                dtype="float64",
                kv_dtype="float64",
                page_size=PAGE,
                num_threads=1,
            )
        )
        runner.allocate(num_pages=8 * CONTEXT // PAGE, max_slots=8, context_len=CONTEXT)
        harness = Harness(
            executor=InprocExecutor(runner),
            num_pages=8 * CONTEXT // PAGE,
            page_size=PAGE,
            vocab_size=131,
            depth=depth,
            strict_accounting=True,
        )
        for number, (rid, options) in enumerate(requests.items()):
            harness.submit(rid, [*PROMPT, number + 10], max_new_tokens=12, **options)
        harness.drain()
        return harness.outcomes

    return run


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["admission", "sampling", "sampling later", "prompt logprobs"])
def test_the_others_are_not_disturbed(
    answers: Callable[..., dict[str, Outcome]],
    depth: int,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = {"greedy": HEALTHY["greedy"], "bad": BAD, **HEALTHY}
    good = answers(depth, requests)
    slot_values, sample, prompt_logprobs = (
        rows.slot_values,
        model_runner.sample,
        model_runner.prompt_logprobs,
    )

    def reads(admit: Any) -> Any:
        if admit.sampling.temperature == POISON:
            raise OverflowError("no column is that wide")
        return slot_values(admit)

    def samples(logits: Any, its: Any, *rest: Any, **more: Any) -> Any:
        bad = np.isclose(its.columns["temperature"], POISON)
        if (bad & (its.columns["length"] >= (14 if where == "sampling later" else 0))).any():
            raise RuntimeError("cannot be drawn")
        return sample(logits, its, *rest, **more)

    def tells(*arguments: Any, num_top: int, **more: Any) -> Any:
        if num_top == BAD["logprobs"].top:
            raise RuntimeError("cannot be told")
        return prompt_logprobs(*arguments, num_top=num_top, **more)

    if where == "admission":
        monkeypatch.setattr(rows, "slot_values", reads)
    elif where == "prompt logprobs":
        monkeypatch.setattr(model_runner, "prompt_logprobs", tells)
    else:
        monkeypatch.setattr(model_runner, "sample", samples)
    outcomes = answers(depth, requests)
    finish = outcomes.pop("bad").finish
    assert finish is not None
    assert finish.status_code == 500
    for rid, outcome in outcomes.items():
        assert outcome.ids == good[rid].ids, rid
        assert outcome.top_logprobs == good[rid].top_logprobs, rid
        assert outcome.finish == good[rid].finish, rid


def test_what_no_row_alone_is_to_blame_for_ends_the_step(
    answers: Callable[..., dict[str, Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(logits: Any, its: Any, *rest: Any, **more: Any) -> Any:
        if len(its.slots) > 1:
            raise RuntimeError("together they fail")
        return sample(logits, its, *rest, **more)

    sample = model_runner.sample
    monkeypatch.setattr(model_runner, "sample", samples)
    with pytest.raises(RuntimeError, match="together they fail"):
        answers(0, HEALTHY)
