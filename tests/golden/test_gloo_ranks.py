"""Ranks that gloo connects: with gathers they have the bits of one rank; with partial sums, as on
GPUs, they have its numbers but for rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.core.sampling import SamplingParams
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.kernel_registry import make_recorder
from setpoint.engine.kernels.program import NotCapturable
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.gloo_groups import gloo_groups
from setpoint_testing.goldens import GOLDENS, tiny_config
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import CheckedExecutor, ranks

CONTEXT, PAGE = 128, 4
SIZES = {"num_rows": 8 * CONTEXT // PAGE, "max_slots": 8, "context_len": CONTEXT}
RNG = np.random.default_rng(3)
PROMPTS = {slot: RNG.integers(3, 131, length).tolist() for slot, length in enumerate((37, 1, 50))}
LLAMA = tiny_config("LlamaForCausalLM", "llama")
HEADS_9_3 = LLAMA | {
    "hidden_size": 144,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
}


def config_of(folder: Path, **more: object) -> EngineConfig:
    options = {"page_size": PAGE, "num_threads": 1, "capture": False}
    return EngineConfig(str(folder), read_spec(folder), **options | more)


def on_ranks(
    config: EngineConfig, size: int, *, sums: bool = False
) -> AbstractContextManager[CheckedExecutor]:
    return ranks(config, size, gloo_groups(size, sums=sums) if size > 1 else (), **SIZES)


def said(
    config: EngineConfig, size: int, *, sums: bool = False
) -> tuple[dict[int, list[int]], list[torch.Tensor]]:
    """Greedy ids and the logits of every step; prompts in chunks beside decode rows. Then sampled
    ids, which need logits outside of a step."""
    with on_ranks(config, size, sums=sums) as executor:
        logits, runner = [], executor.executor.runner
        driver = Driver(executor, PAGE, CONTEXT // PAGE, runner.num_groups)
        forward = runner.forward

        def watched(plan, ways=None):
            done = forward(plan, ways)
            logits.append(done.logits.clone() if done.logits is not None else torch.zeros(0))
            return done

        runner.forward = watched
        ids = driver.generate(PROMPTS, 6, chunk=23)
        plan = driver.plan()
        scored = SamplingParams(temperature=0.8)
        wants = RequestOptions(logprobs=LogprobOptions(top=2))
        driver.admit(plan, 5, PROMPTS[0], sampling=scored, seed=7, options=wants, logprob_start=0)
        plan.add_row(5, 5, 0, len(PROMPTS[0]), 1)
        prompt = driver.run(plan).prompt_logprobs[5]
        return ids | {5: driver.outputs[5]}, [*logits, torch.from_numpy(prompt.values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.cases(5)
@pytest.mark.parametrize(("size", "keys"), [(2, LLAMA), (2, HEADS_9_3), (3, HEADS_9_3), (4, LLAMA)])
@pytest.mark.parametrize("quantization", [None, "w8a8_int8"])
def test_the_bits_of_one_rank(
    size: int, keys: dict, quantization: str | None, tmp_path: Path
) -> None:
    config = config_of(write_tiny(tmp_path, keys), quantization=quantization)
    one, several = said(config, 1), said(config, size)
    assert one[0] == several[0]
    assert same(one[1], several[1])


@pytest.mark.cases(7)
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_partial_sums_in_float64(golden, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if "kv_lora_rank" in golden.config:  # all heads share the cache
        heads = {}
    folder = write_tiny(tmp_path, golden.config | heads)
    if read_spec(folder).pooling is not None or golden.model_impl != "setpoint":
        pytest.skip("has no logits, or no model of Setpoint's own")
    if 2 not in read_spec(folder).rank_counts:
        pytest.skip("is not divided among ranks")
    config = config_of(folder, dtype="float64", kv_dtype="float64")
    one, several = said(config, 1), said(config, 2, sums=True)
    assert one[0] == several[0]
    assert not same(one[1], several[1]), "the order of the sums did not change"
    for a, b in zip(one[1], several[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "keys"), [(3, HEADS_9_3), (4, LLAMA)])
def test_a_bias_is_added_once(size: int, keys: dict, tmp_path: Path) -> None:
    keys = keys | {"attention_bias": True, "mlp_bias": True}
    config = config_of(write_tiny(tmp_path, keys), dtype="float64", kv_dtype="float64")
    one, several = said(config, 1), said(config, size, sums=True)
    for a, b in zip(one[1], several[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_rank_loads_its_columns_of_the_second_matrices(tmp_path: Path) -> None:
    config = config_of(write_tiny(tmp_path, LLAMA))
    with on_ranks(config, 2, sums=True) as executor:
        model = executor.executor.runner.model.model
        assert [layer.self_attn.o_proj.columns for layer in model.layers] == [(0, 32)] * 2
        assert [layer.mlp.down_proj.columns for layer in model.layers] == [(0, 32)] * 2
        halved = executor.executor.runner.report.weight_bytes
    assert halved < 0.55 * build_runner(config).report.weight_bytes


def test_no_step_with_an_exchange_is_captured(tmp_path: Path) -> None:
    config = config_of(write_tiny(tmp_path, LLAMA))
    with on_ranks(config, 2) as executor:
        group, runner = executor.executor.runner.backends.group, executor.executor.runner
        ids = torch.zeros(3, dtype=torch.int32)
        with (
            pytest.raises(NotCapturable, match=r"exchanges through torch\.distributed"),
            make_recorder(torch.device("cpu")).recording(),
        ):
            group.own_ids(ids, (0, 2))
        runner._make_ways(capture=True)
        assert [way.name for way in runner.ways] == ["eager"]
        assert runner.why_eager == "exchanges through torch.distributed cannot be captured"
