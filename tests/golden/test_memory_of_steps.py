"""A step whose tensors do not fit into the device's memory, on a real model: the requests get the
tokens that they get without it, and nothing of the step stays in memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import OutOfMemoryError
from setpoint.core.records import Fallback, StepLost
from setpoint.core.request import LogprobOptions
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.device import lack_of
from setpoint.engine.runner import model_runner
from setpoint_testing.harness import Harness
from setpoint_testing.tiny_models import write_tiny_llama

PAGE, CONTEXT = 4, 64
TOLD = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 1.03 GiB is free. Including non-PyTorch memory, this process has 78.11 GiB memory in"
    " use. See documentation for Memory Management"
)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "told": {"temperature": 0.0, "logprobs": LogprobOptions(0, 2, (5, 6))},
    "biased": {"temperature": 0.5, "seed": 4, "logit_bias": {9: 3.0}, "frequency_penalty": 0.5},
}


class Trap:
    """An operation that fails at one of its calls as if the device's memory were full."""

    def __init__(self, operation: Callable[..., Any], at: set[int]) -> None:
        self.operation, self.at, self.num_calls = operation, at, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in self.at:
            raise torch.OutOfMemoryError(TOLD)
        return self.operation(*args, **kwargs)


@pytest.fixture(scope="module")
def make_harness(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Harness]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))

    def make(depth: int) -> Harness:
        config = EngineConfig(
            str(folder),
            read_spec(folder),
            dtype="float64",
            kv_dtype="float64",
            page_size=PAGE,
            num_threads=1,
        )
        runner = build_runner(config)
        runner.allocate(num_pages=8 * CONTEXT // PAGE, max_slots=8, context_len=CONTEXT)
        return Harness(
            executor=InprocExecutor(runner),
            num_pages=8 * CONTEXT // PAGE,
            page_size=PAGE,
            vocab_size=131,
            depth=depth,
            chunked_prefill_size=16,
            strict_accounting=True,
        )

    return make


def serve(harness: Harness) -> Harness:
    for number, (rid, options) in enumerate(REQUESTS.items()):
        prompt = [*range(3, 14), *range(20, 20 + 3 * number)]
        harness.submit(rid, prompt, max_new_tokens=12, **options)
        harness.turn()
    harness.drain()
    return harness


def set_trap(monkeypatch: pytest.MonkeyPatch, harness: Harness, where: str, at: set[int]) -> Trap:
    if where == "forward":
        ways = harness.executor.runner.ways
        trap = Trap(ways[0].run, at)
        monkeypatch.setattr(ways[0], "run", trap)
    else:
        name = {"sampling": "sample", "prompt logprobs": "prompt_logprobs"}[where]
        trap = Trap(getattr(model_runner, name), at)
        monkeypatch.setattr(model_runner, name, trap)
    return trap


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("where", "at"),
    [
        ("forward", 1),
        ("forward", 4),
        ("forward", 9),
        ("sampling", 2),
        ("sampling", 7),
        ("prompt logprobs", 1),
    ],
)
def test_every_request_gets_its_tokens(
    make_harness: Callable[[int], Harness],
    monkeypatch: pytest.MonkeyPatch,
    depth: int,
    where: str,
    at: int,
) -> None:
    good = serve(make_harness(depth)).outcomes
    harness = make_harness(depth)
    trap = set_trap(monkeypatch, harness, where, {at})
    serve(harness)
    assert trap.num_calls > at
    (lost,) = harness.recorder.of(StepLost)
    assert lost.lack.why == TOLD.partition(". Including")[0]
    assert lost.lack.wanted_bytes == int(2.5 * (1 << 30))
    for rid, outcome in harness.outcomes.items():
        assert outcome.finish == good[rid].finish, rid
        assert outcome.ids == good[rid].ids, rid
        assert outcome.top_logprobs == good[rid].top_logprobs, rid


def test_nothing_of_a_lost_step_is_held_when_its_memory_is_given_back(
    make_harness: Callable[[int], Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the logits then keeps the allocator from giving their memory back. No row is tried
    alone, as after other errors."""
    harness = make_harness(1)
    trap = set_trap(monkeypatch, harness, "sampling", {3})
    runner = harness.executor.runner
    logits: list[weakref.ref[torch.Tensor]] = []
    seen: list[tuple[bool, int]] = []
    sample, give_back = runner.sample, runner.give_back

    def samples(forward: Any, masks: Any) -> Any:
        if forward.answer is not None:
            logits.append(weakref.ref(forward.answer.logits))
        return sample(forward, masks)

    def given_back() -> None:
        seen.append((logits[-1]() is None, trap.num_calls))
        give_back()

    monkeypatch.setattr(runner, "sample", samples)
    monkeypatch.setattr(runner, "give_back", given_back)
    monkeypatch.setattr(runner, "ways", runner.ways[-1:])  # a replayed step's logits stay
    gc.disable()
    try:
        serve(harness)
    finally:
        gc.enable()
    assert seen == [(True, 3)]


def test_it_is_counted_and_the_second_time_ends_the_engine(
    make_harness: Callable[[int], Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(1)
    set_trap(monkeypatch, harness, "forward", {3, 8})
    with pytest.raises(OutOfMemoryError, match=r"1.03 GiB is free. What would fit: "):
        serve(harness)
    (told,) = harness.recorder.of(Fallback)
    assert told.what == "a step computes at most 8 prompt tokens"


def test_an_error_without_a_size_is_told_too() -> None:
    lack = lack_of(torch.OutOfMemoryError("HIP out of memory.\nMore"), torch.device("cpu"))
    assert (lack.why, lack.wanted_bytes, lack.total_bytes) == ("HIP out of memory", 0, 0)
