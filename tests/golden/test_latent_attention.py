"""Latent attention: its kernels at every level, the same bits however a prompt is cut and wherever
its beginning comes from, the size of its cache, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.executor.build_runner import KV_DTYPES, EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.kernels.cpu import ops as cpu_ops
from setpoint.engine.kernels.ref import RefOps
from setpoint.engine.models.model_registry import build_model
from setpoint.engine.quant import cpu_linear, plain
from setpoint.engine.quant.heads import KernelHeads, LoopedHeads, StackedHeads, of_heads
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.operation_cases import BF16, FP32, LATENTS, latent_arguments
from setpoint_testing.plans import Driver, allocate_rows

CONFIGS = {golden.name: golden.config for golden in GOLDENS}
V2 = CONFIGS["deepseek_v2: groups, queries without a latent vector, yarn"]
V3 = CONFIGS["deepseek_v3: groups"]
PAGE, CONTEXT = 4, 128


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_head_has_the_bits_of_its_weight_alone(dtype: torch.dtype, level: str) -> None:
    torch.manual_seed(0)
    heads, k, columns = 5, 48, 80
    weights = [
        cpu_linear.create(dtype, level=level).pack(torch.randn(columns, k).to(dtype), None)
        for _ in range(heads)
    ]
    together = of_heads(weights)
    assert isinstance(together, KernelHeads)
    for rows in (1, 2, 7, 300):
        x = torch.randn(rows, heads, k + 16).to(dtype)[..., :k]
        found = together(x)
        for head, weight in enumerate(weights):
            assert torch.equal(found[:, head], weight(x[:, head].contiguous()))
        assert torch.equal(together(x[-1:]), found[-1:])


def test_heads_on_torch() -> None:
    weights = [plain.create(FP32).pack(torch.randn(8, 6), None) for _ in range(3)]
    together, x = of_heads(weights), torch.randn(4, 3, 6)
    assert isinstance(together, LoopedHeads)
    for head, weight in enumerate(weights):
        assert torch.allclose(together(x)[:, head], weight(x[:, head]))


def test_heads_in_one_product() -> None:
    weights = [plain.create(FP32).pack(torch.randn(8, 6).double(), None) for _ in range(3)]
    together, x = StackedHeads(weights), torch.randn(5, 3, 9).double()[..., :6]
    found = together(x)
    assert found.is_contiguous()
    assert torch.allclose(found, LoopedHeads(weights)(x), rtol=1e-12)
    assert torch.equal(together(x[2:3]), found[2:3])
    for weight in weights:
        weight.weight = weight.weight.to("meta")
    assert isinstance(of_heads(weights), StackedHeads)
    assert of_heads(weights)(x.to("meta")).shape == (5, 3, 8)


@each_level
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_stored_vectors_and_queries_match_the_reference(
    dtype: torch.dtype, level: str, interleaved: bool
) -> None:
    heads, rank = 3, 40
    for rows, rope in LATENTS:
        given = latent_arguments(rows, rope, heads, rank, dtype)
        index = torch.randperm(100)[:rows]
        for kind in {dtype, torch.float8_e4m3fn, torch.float8_e5m2}:
            caches = [torch.zeros(25, 4, 1, rank + rope).to(kind) for _ in range(2)]
            scale = 0.3 if kind.itemsize == 1 else 1.0
            found, expected = (
                ops.rope_and_store_latent(*given, cache, index, scale, interleaved=interleaved)
                for ops, cache in zip(
                    (cpu_ops.create(dtype, level=level), RefOps()), caches, strict=True
                )
            )
            tolerance = 1e-6 if dtype == FP32 else 2**-7
            assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
            step = {FP32: 1e-6, BF16: 2**-7}.get(kind, 2**-2)
            one, other = (cache.float() for cache in caches)
            assert torch.allclose(one, other, rtol=step, atol=step)


def runner_of(folder: Path, **more: Any) -> ModelRunner:
    options = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "page_size": PAGE, "num_threads": 1}
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), **options | more))
    allocate_rows(runner, num_rows=8 * CONTEXT // PAGE, max_slots=8, context_len=CONTEXT)
    return runner


def last_logits(runner: ModelRunner, cached: int, chunk: int) -> list[torch.Tensor]:
    """The logits after a prompt and of three more tokens. Its first ``cached`` tokens, whole pages,
    were computed for another sequence."""
    prompt = [3 + 7 * index % 120 for index in range(45)]
    driver = Driver(InprocExecutor(runner), PAGE, CONTEXT // PAGE, runner.num_groups)
    logits, forward = [], runner.forward

    def watched(plan: Any, ways: Any) -> Any:
        done = forward(plan, ways)
        if done.logits is not None:
            logits.append(done.logits.clone())
        return done

    if cached:
        plan = driver.plan()
        driver.admit(plan, 1, [*prompt[:cached], 9])
        plan.add_row(1, 1, 0, cached + 1, 0)
        driver.run(plan)
    runner.forward = watched
    plan = driver.plan()
    driver.admit(plan, 0, prompt, share=(1, cached // PAGE))
    for begin in range(cached, len(prompt), chunk):
        count = min(chunk, len(prompt) - begin)
        plan.add_row(0, 0, begin, count, int(begin + count == len(prompt)))
        driver.run(plan)
        plan = driver.plan()
    driver.decode([0], 3)
    runner.forward = forward
    return logits


@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_chunks_and_hits_change_no_bit(
    tmp_path: Path, config: dict[str, Any], kv_dtype: str
) -> None:
    runner = runner_of(write_tiny(tmp_path, config), kv_dtype=kv_dtype)
    wanted = last_logits(runner, 0, 45)
    assert len(wanted) == 4
    for cached in (0, PAGE, 5 * PAGE, 11 * PAGE):
        for chunk in (1, PAGE - 1, PAGE, PAGE + 1, 45):
            found = last_logits(runner, cached, chunk)
            assert all(map(torch.equal, found, wanted)), (cached, chunk)


def test_the_cache_has_the_size_of_the_formula(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, V3)
    for kv_dtype, size in (("bfloat16", 2), ("fp8_e4m3", 1)):
        pool = runner_of(folder, kv_dtype=kv_dtype).pool
        numbers = V3["kv_lora_rank"] + V3["qk_rope_head_dim"]
        assert read_spec(folder).kv_bytes_per_token(size) == numbers * 3 * size
        assert pool.num_bytes == (pool.num_tokens + PAGE) * numbers * 3 * size
        assert [part.dtype for part in pool.layers[0]] == [KV_DTYPES[kv_dtype]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "tanh"}, "'scoring_func' = 'tanh'.*'sigmoid'"),
        ({"topk_method": "random"}, "'topk_method' = 'random'.*'noaux_tc'"),
        ({"n_group": 3}, "'n_group' = 3.*divide the 8 experts"),
        ({"n_group": 8}, "'n_group' = 8.*at least 2 experts"),
        ({"topk_group": 5}, "'topk_group' = 5.*4 groups"),
        ({"topk_group": 1}, "'topk_group' = 1.*fewer than 3 experts"),
        ({"num_key_value_heads": 2}, "'num_key_value_heads' is 2.*latent"),
        ({"n_routed_experts": 2}, "'num_experts_per_tok' is 3"),
        ({"kv_lora_rank": 0}, "'kv_lora_rank' must be a positive integer"),
        ({"qk_rope_head_dim": 5}, "'qk_rope_head_dim' is 5.*even"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' must be an integer"),
        ({"quantization_config": {"quant_method": "quark"}}, "'quark', which is not supported"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3 | changes))
    with pytest.raises(CheckpointError, match=message):
        build_model(read_spec(tmp_path))


def test_v2_refuses_what_its_implementations_differ_in(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V2 | {"norm_topk_prob": True}))
    with pytest.raises(CheckpointError, match="'norm_topk_prob' = True"):
        build_model(read_spec(tmp_path))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, V3)
    count = read_spec(folder).num_parameters
    config = V3 | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_spec(folder).num_parameters < count
    build_runner(EngineConfig(str(folder), read_spec(folder), dtype="float32"))
    (folder / "config.json").write_text(json.dumps(V3 | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="does not belong"):
        build_runner(EngineConfig(str(folder), read_spec(folder), dtype="float32"))
