"""A replayed step has the bits of the eager one: every declared architecture, any mix of rows,
every level, one thread and two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.plan import OWN_LENGTH
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.cpu import capture
from setpoint.engine.kernels.cpu.build import LEVEL_VARIABLE
from setpoint.engine.kernels.program import KINDS, NotCapturable
from setpoint.engine.models.decoder import CausalLM
from setpoint.engine.models.model_registry import MODELS
from setpoint.engine.runner import replay_way as replay
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

CONTEXT, PAGE, MAX_TOKENS = 128, 4, 48
RNG = np.random.default_rng(5)
PROMPTS = {
    slot: RNG.integers(3, 131, length).tolist()
    for slot, length in enumerate((37, 1, 16, 47, 50, 5, 90, 2))
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def of_architecture(architecture: str) -> dict:
    config = next(
        golden.config
        for golden in reversed(GOLDENS)
        if golden.config["architectures"] == [architecture]
    )
    return config if "kv_lora_rank" in config else config | HEADS


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests have steps on both sides of the limit."""
    monkeypatch.setattr(replay, "CAPTURED_TOKENS", MAX_TOKENS)


def make_runner(
    folder: Path, dtype: str = "bfloat16", num_threads: int = 2, **more: object
) -> ModelRunner:
    options = {"dtype": dtype, "kv_dtype": dtype, "page_size": PAGE, "num_threads": num_threads}
    config = EngineConfig(str(folder), read_spec(folder), **options | more)
    runner = build_runner(config)
    allocate(runner)
    return runner


def allocate(runner: ModelRunner) -> None:
    allocate_rows(runner, num_rows=20 * CONTEXT // PAGE, max_slots=20, context_len=CONTEXT)


def names(runner: ModelRunner) -> list[str]:
    return [way.name for way in runner.ways]


def said(runner: ModelRunner, chunk: int = 23) -> tuple[dict[int, list[int]], list[torch.Tensor]]:
    """Greedy ids and the logits of every step, of prompts side by side: steps mix chunks and decode
    rows, up to the limit and past it."""
    driver, logits = Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups), []
    forward = runner.forward

    def watched(plan, ways):
        done = forward(plan, ways)
        logits.append(done.logits.clone() if done.logits is not None else None)
        return done

    runner.forward = watched
    ids = driver.generate(PROMPTS, 12, chunk=chunk)
    plan = driver.plan()
    driver.admit(plan, 18, PROMPTS[6])  # a higher slot: the page table grows
    plan.add_row(18, 18, 0, 40, 0)
    for slot in PROMPTS:
        plan.add_row(slot, slot, OWN_LENGTH, 1, 1)
    driver.run(plan)
    runner.forward = forward
    return ids, logits


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.cases(8)
@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_architecture(architecture: str, dtype: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, of_architecture(architecture))
    replayed, eager = make_runner(folder, dtype), make_runner(folder, dtype, capture=False)
    assert not replayed.why_eager
    assert (names(replayed), names(eager)) == (["replay", "eager"], ["eager"])
    first, second = said(replayed), said(eager)
    assert first[0] == second[0]
    assert same(first[1], second[1])
    allocate(replayed)  # another pool, another table
    assert same(said(replayed)[1], second[1])


@pytest.mark.parametrize("capture", [True, False])
def test_the_result_says_which_way_its_step_ran(capture: bool, tmp_path: Path) -> None:
    runner = make_runner(write_tiny(tmp_path, of_architecture("LlamaForCausalLM")), capture=capture)
    driver, prompt = (
        Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups),
        list(range(3, 3 + MAX_TOKENS + 20)),
    )
    said = []
    for begin, count in ((0, MAX_TOKENS + 1), (MAX_TOKENS + 1, 19)):
        plan = driver.plan()
        if begin == 0:
            driver.admit(plan, 0, prompt)
        plan.add_row(0, 0, begin, count, int(begin + count == len(prompt)))
        said.append(driver.run(plan).way)
    said += [result.way for result in driver.decode([0], 2)]
    assert said == ["eager"] + ["replay" if capture else "eager"] * 3


@each_level
def test_every_level_and_number_of_threads(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, of_architecture("Qwen3ForCausalLM"))
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    wanted = said(make_runner(folder, capture=False))[1]
    for num_threads in (1, 2):
        runner = make_runner(folder, num_threads=num_threads)
        assert "replay" in names(runner)
        assert same(said(runner)[1], wanted)


def test_weights_of_8_bits(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, of_architecture("LlamaForCausalLM"))
    replayed, eager = (
        make_runner(folder, quantization="w8a8_int8", capture=capture) for capture in (True, False)
    )
    assert "replay" in names(replayed)
    assert same(said(replayed)[1], said(eager)[1])


def test_what_cannot_be_recorded_is_a_reason(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, of_architecture("LlamaForCausalLM"))
    for reason, how in {
        "aten::": {"dtype": "float64"},
        "torch's": {"model_impl": "transformers"},
        "switched off": {"capture": False},
    }.items():
        runner = make_runner(folder, **how)
        assert names(runner) == ["eager"]
        assert reason in runner.why_eager
        assert len(said(runner)[0][0]) == 12


def test_logits_with_a_soft_cap_are_replayed(tmp_path: Path) -> None:
    config = next(
        golden.config for golden in GOLDENS if golden.config.get("final_logit_softcapping")
    )
    folder = write_tiny(tmp_path, config | HEADS | {"final_logit_softcapping": 2.0})
    replayed, eager = make_runner(folder), make_runner(folder, capture=False)
    assert not replayed.why_eager
    logits = said(replayed)[1]
    assert same(logits, said(eager)[1])
    assert all(each is None or 1 < each.abs().max() <= 2 for each in logits)


def test_the_head_alone_may_stay_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CausalLM, "logits", lambda model, hidden, backends: model.lm_head(hidden, backends).div_(2)
    )
    folder = write_tiny(tmp_path, of_architecture("LlamaForCausalLM"))
    replayed, eager = make_runner(folder), make_runner(folder, capture=False)
    assert "replay" in names(replayed)
    assert "aten::div_" in replayed.why_eager
    assert same(said(replayed)[1], said(eager)[1])


def test_times_by_kind(tmp_path: Path) -> None:
    runner = make_runner(write_tiny(tmp_path, of_architecture("LlamaForCausalLM")))
    way = runner.ways[0]
    way.start_timing()
    said(runner)  # the slots grow in the middle of it
    said(runner)
    times = way.take_times()
    # The activation is part of the product of gate and up.
    assert {kind for kind, seconds in times.items() if seconds} == set(KINDS) - {
        "activation",
        "exchange",
    }
    assert not any(way.take_times().values())


def test_memory_is_used_again_and_never_too_early() -> None:
    arena = capture.Arena()
    first = arena.empty((4, 3), torch.bfloat16)
    address, view = first.data_ptr(), first[1:]
    del first
    assert arena.empty((4, 3), torch.bfloat16).data_ptr() != address, "a view of it is still there"
    del view
    assert arena.empty((3, 4), torch.bfloat16).data_ptr() == address
    assert address % 64 == 0
    assert len(arena.memory) == 2


def test_an_operation_that_computes_is_refused() -> None:
    x = torch.ones(4, 6)
    for compute in (
        lambda: x + 1,
        lambda: x.mul_(2),
        lambda: x.t().contiguous(),
        lambda: x[torch.tensor([1])],
        lambda: x.sum().item(),
    ):
        recorder = capture.create()
        with pytest.raises(NotCapturable, match="aten::"), recorder.recording():
            compute()
    recorder = capture.create()
    with recorder.recording():
        x.view(2, 12).split(6, dim=1)[0].flatten(1).t()[1:].unsqueeze(0).expand(2, -1, -1)
        assert torch.empty_like(x).shape == x.shape
