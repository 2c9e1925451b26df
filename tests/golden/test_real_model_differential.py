"""Greedy ids do not depend on how the work is cut up: cache, chunks, pages, company, depth,
retraction, resumption.

Scheduler, loop, runner and model in one process, as the engine process puts them together. On tiny
models in float64, or on the C++ kernels in bfloat16, the ids are identical; on the default model in
float32 they follow the near-tie rule (``setpoint_testing.neartie``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from setpoint.checkpoint.source import locate
from setpoint.checkpoint.spec import read_spec
from setpoint.core.request import LogprobOptions
from setpoint.core.settings import PrioritySettings
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.scheduler.policy import POLICIES
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.harness import Harness
from setpoint_testing.neartie import NEAR_TIE, Greedy, Tally
from setpoint_testing.plans import allocate_rows
from setpoint_testing.tiny_models import write_tiny_llama
from setpoint_testing.whole_checkpoint import write_whole

PAGES = (1, 4, 16)
CUTS = [
    (page, chunk) for page in PAGES for chunk in sorted({1, page - 1, page, page + 1} - {0})
] + [(page, None) for page in PAGES]
"""(page size, chunk size); None = whole prompts."""
VARIANTS: dict[str, dict[str, Any]] = {
    "cache_off": {"cache_enabled": False},
    "mixed_chunk": {"mixed_chunk": True, "chunked_prefill_size": 24},
    "longest_prefix_first": {"policy": "lpm", "chunked_prefill_size": 32},
    "depth_1": {"depth": 1, "chunked_prefill_size": 24},
    "depth_2": {"depth": 2, "chunked_prefill_size": 24, "mixed_chunk": True},
    "depth_2_without_replanning": {"depth": 2, "replan_inflight": False},
    "retract_every_step": {"test_retract_interval": 1},
    "retract_every_5_steps": {"test_retract_interval": 5, "depth": 1},
    "small_pool": {"num_tokens": 352, "chunked_prefill_size": 40, "clip_max_new_tokens": 2},
    "small_pool_without_cache": {
        "num_tokens": 352,
        "cache_enabled": False,
        "depth": 1,
        "clip_max_new_tokens": 2,
    },
    "few_slots": {"max_running_requests": 3},
}
KERNEL_MODELS = ("qwen2_moe: shared expert",)
"""Models whose answers on the C++ kernels are the same bits however the work is cut up."""


@dataclass(frozen=True)
class Model:
    folder: Path
    dtype: str
    prompts: tuple[tuple[int, ...], ...]
    """Some share prefixes, some of them with whole pages."""
    num_new: int
    num_tokens: int
    """The size of the pool, unless a variant says otherwise."""
    num_threads: int = 1
    device: str = "cpu"

    @cache  # noqa: B019 - models are as few as their fixtures
    def runner(self, page_size: int) -> ModelRunner:
        config = EngineConfig(
            str(self.folder),
            read_spec(self.folder),
            dtype=self.dtype,
            kv_dtype=self.dtype,
            page_size=page_size,
            num_threads=self.num_threads,
            device=self.device,
        )
        return build_runner(config)

    def harness(self, page_size: int, *, num_tokens: int = 0, **config: Any) -> Harness:
        runner, num_rows = self.runner(page_size), (num_tokens or self.num_tokens) // page_size
        settings = {
            "max_running_requests": len(self.prompts),
            "max_req_len": 250,
            "max_req_input_len": 245,
        } | config
        max_slots = settings["max_running_requests"]
        groups = allocate_rows(runner, num_rows=num_rows, max_slots=max_slots, context_len=256)
        return Harness(
            num_pages=num_rows * groups,
            page_size=page_size,
            row=runner.pool.layout.page_row,
            executor=InprocExecutor(runner),
            vocab_size=runner.spec.vocab_size,
            **settings,
        )

    def run(
        self, harness: Harness, *, gaps: bool = False, prior: list[list[int]] | None = None
    ) -> list[Greedy]:
        """All prompts at once, with no EOS to end them early; ``prior`` outputs belong to the
        answers."""
        options: dict[str, Any] = {"max_new_tokens": self.num_new, "temperature": 0.0}
        if gaps:
            options["logprobs"] = LogprobOptions(top=2)
        for index, prompt in enumerate(self.prompts):
            harness.submit(f"r{index}", prompt, prior=prior[index] if prior else (), **options)
        harness.drain()
        outcomes = [harness.outcomes.pop(f"r{index}") for index in range(len(self.prompts))]
        assert all(
            outcome.finish is not None and outcome.finish.type == "length" for outcome in outcomes
        )
        answers = [
            Greedy.of_top([*(prior[index] if prior else ()), *outcome.ids], outcome.top_logprobs)
            for index, outcome in enumerate(outcomes)
        ]
        assert all(len(answer.ids) == self.num_new for answer in answers)
        return answers

    @cache  # noqa: B019
    def alone(self) -> list[Greedy]:
        """One request at a time, whole prompts, no cache."""
        return self.run(
            self.harness(
                16, cache_enabled=False, max_running_requests=1, chunked_prefill_size=None
            ),
            gaps=True,
        )


def some_prompts(vocab_size: int, *, seed: int, count: int = 12) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, 48).tolist()
    prompts = [
        rng.integers(3, vocab_size, int(length)).tolist() for length in rng.integers(1, 90, count)
    ]
    for index in range(0, count, 3):
        prompts[index] = shared[: (17, 32, 40, 48)[index // 3 % 4]] + prompts[index]
    return tuple(map(tuple, prompts))


@pytest.fixture(scope="module", params=["llama", *KERNEL_MODELS])
def tiny(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    if request.param == "llama":
        write_tiny_llama(folder, seed=4)
    else:
        config = next(golden.config for golden in GOLDENS if golden.name == request.param)
        write_tiny(folder, config)
    return Model(
        folder,
        "float64" if request.param == "llama" or device != "cpu" else "bfloat16",
        some_prompts(131, seed=1),
        num_new=24,
        num_tokens=2048,
        device=device,
    )


@pytest.fixture(scope="module")
def default(device: str) -> Model:
    folder = locate(None, log=lambda line: None).folder
    prompts = some_prompts(40_000, seed=2, count=5)
    return Model(
        folder, "float32", prompts, num_new=12, num_tokens=2048, num_threads=2, device=device
    )


@pytest.fixture(scope="module")
def default_long(default: Model) -> Model:
    return replace(default, prompts=some_prompts(40_000, seed=3), num_new=40, num_tokens=4096)


def ids_of(answers: list[Greedy]) -> list[list[int]]:
    return [answer.ids for answer in answers]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("page_size", "chunk"), CUTS)
def test_chunks_pages_and_a_warm_cache(tiny: Model, page_size: int, chunk: int | None) -> None:
    """Twice: the second time every prompt is in the cache."""
    harness = tiny.harness(page_size, chunked_prefill_size=chunk)
    assert ids_of(tiny.run(harness)) == ids_of(tiny.alone())
    assert ids_of(tiny.run(harness)) == ids_of(tiny.alone())
    assert harness.recorder.steps[-1].pool.evictable > 0


@pytest.mark.cases(20)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", PAGES)
def test_variants(tiny: Model, page_size: int, variant: str) -> None:
    harness = tiny.harness(page_size, **VARIANTS[variant])
    assert ids_of(tiny.run(harness)) == ids_of(tiny.alone())
    if "retract" in variant or variant == "small_pool":
        assert harness.recorder.retractions


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))]
)
def test_mixtures_of_variants(tiny: Model, seed: int) -> None:
    rng = random.Random(seed)
    page_size = rng.choice(PAGES)
    config: dict[str, Any] = {
        "chunked_prefill_size": rng.choice([None, 1, 5, 16, 33]),
        "mixed_chunk": rng.random() < 0.5,
        "depth": rng.choice([0, 1, 2]),
        "cache_enabled": rng.random() < 0.7,
        "policy": rng.choice(list(POLICIES)),
        "test_retract_interval": rng.choice([0, 1, 2, 7]),
        "num_tokens": rng.choice([208, 400, 2048]),
        "max_running_requests": rng.choice([2, 5, 12]),
    }
    harness = tiny.harness(page_size, **config)
    prior = [answer.ids[: rng.choice([0, 1, 9])] for answer in tiny.alone()]
    assert ids_of(tiny.run(harness, prior=prior)) == ids_of(tiny.alone()), config


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_requests_end_with_the_tokens_they_would_have_had(
    tiny: Model, depth: int
) -> None:
    harness = tiny.harness(
        4,
        depth=depth,
        max_running_requests=2,
        chunked_prefill_size=16,
        priority=PrioritySettings(threshold=0),
    )
    for index, prompt in enumerate(tiny.prompts):
        harness.submit(
            f"r{index}", prompt, max_new_tokens=tiny.num_new, temperature=0.0, priority=index
        )
        harness.turn(6)
    harness.drain()
    assert len(harness.recorder.preemptions) > 3
    assert [outcome.ids for outcome in harness.outcomes.values()] == ids_of(tiny.alone())


@pytest.mark.parametrize("num_prior", [1, 15, 16, 23])
def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(tiny: Model, num_prior: int) -> None:
    prior = [answer.ids[:num_prior] for answer in tiny.alone()]
    assert ids_of(tiny.run(tiny.harness(4, chunked_prefill_size=16), prior=prior)) == ids_of(
        tiny.alone()
    )


def check(model: Model, name: str, answers: list[Greedy]) -> None:
    tally = Tally()
    for index, (answer, reference) in enumerate(zip(answers, model.alone(), strict=True)):
        tally.check(f"prompt {index}", answer.ids, reference)
    print(f"default model, {name}: {tally}")


def test_the_default_model_computes_what_transformers_does(default: Model, tmp_path: Path) -> None:
    """One forward pass of transformers over prompt and our outputs judges every output by what
    precedes it."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        write_whole(default.folder, tmp_path), dtype=torch.float32
    ).eval()
    num_ties = num_tokens = 0
    for prompt, answer in zip(default.prompts, default.alone(), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer.ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        behind = logits.max(-1).values - logits[torch.arange(len(answer.ids)), answer.ids]
        assert behind.max() < NEAR_TIE, (
            f"prompt {len(prompt)} long, output {int(behind.argmax())} is {behind.max():.2g} behind"
            " the best"
        )
        num_ties += int((behind > 0).sum())
        num_tokens += len(answer.ids)
    print(
        f"default model against transformers: {num_tokens} greedy tokens, {num_ties} of them near"
        " ties decided otherwise"
    )


def test_a_mixture_on_the_default_model(default: Model) -> None:
    harness = default.harness(
        16,
        depth=2,
        mixed_chunk=True,
        chunked_prefill_size=48,
        num_tokens=256,
        test_retract_interval=4,
    )
    check(default, "mixture", default.run(harness))
    assert harness.recorder.retractions


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_default_model(default_long: Model, variant: str) -> None:
    harness = default_long.harness(16, **VARIANTS[variant])
    check(default_long, variant, default_long.run(harness))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page_size", "chunk"), [cut for cut in CUTS if cut != (1, 1)])
def test_chunks_pages_and_a_warm_cache_of_the_default_model(
    default: Model, page_size: int, chunk: int | None
) -> None:
    harness = default.harness(page_size, chunked_prefill_size=chunk)
    check(default, f"page {page_size}, chunk {chunk}, cold", default.run(harness))
    check(default, f"page {page_size}, chunk {chunk}, warm", default.run(harness))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_prior", [1, 20, 39])
def test_resumption_of_the_default_model(default_long: Model, num_prior: int) -> None:
    prior = [answer.ids[:num_prior] for answer in default_long.alone()]
    harness = default_long.harness(4, chunked_prefill_size=32)
    check(default_long, f"resumed after {num_prior}", default_long.run(harness, prior=prior))
