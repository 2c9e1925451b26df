"""gpt-oss from a checkpoint in MXFP4: the blocks against transformers' own conversion, kept and
converted, whole and divided; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.planning.memory import weight_bytes
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver
from setpoint_testing.ranks import ranks
from setpoint_testing.runners import runner_of

CONFIG = next(each.config for each in GOLDENS if each.name.startswith("gpt_oss: yarn")) | {
    "intermediate_size": 96
}
EXPERTS, SIZE, HIDDEN = CONFIG["num_local_experts"], CONFIG["intermediate_size"], 64
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
Tensors = dict[str, torch.Tensor]


def write(folder: Path, *, converted: bool = False) -> Path:
    """A tiny random model in MXFP4; converted: as transformers dequantises it, in bfloat16."""
    write_tiny(folder, CONFIG)
    file = folder / "model.safetensors"
    tensors = {name: each.bfloat16() for name, each in load_file(file).items()}
    rng = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, rows = tensors.pop(name).shape
        shape = (EXPERTS, rows, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=rng)
        scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=rng)
        scales[:, ::5] = 0
        if converted:
            tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        else:
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, file, {"format": "pt"})
    config = CONFIG if converted else CONFIG | {"quantization_config": QUANTISED}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return folder


def logits_of(runner: ModelRunner, num_tokens: int) -> torch.Tensor:
    ids = np.random.default_rng(0).integers(3, 131, num_tokens).tolist()
    groups = len(runner.pool.layout.groups)
    driver = Driver(InprocExecutor(runner), 4, 16, groups)
    plan = driver.plan()
    driver.admit(plan, 0, ids)
    plan.add_row(0, 0, 0, len(ids), 1)
    return runner.forward(plan.build()).logits


def test_blocks_are_kept_and_give_the_bits_of_bfloat16(tmp_path: Path) -> None:
    folder = write(tmp_path / "blocks")
    kept, wide = runner_of(folder), runner_of(folder, quantization="unquant")
    theirs = runner_of(write(tmp_path / "wide", converted=True))
    for num_tokens in (1, 33):
        logits = logits_of(kept, num_tokens)
        assert logits.isfinite().all()
        assert torch.equal(logits, logits_of(wide, num_tokens))
        assert torch.equal(logits, logits_of(theirs, num_tokens))
    kinds = [module.blocks for module in kept.model.modules() if hasattr(module, "keep_blocks")]
    assert kinds.count("MXFP4") == 2 * EXPERTS * CONFIG["num_hidden_layers"]
    assert not kept.why_eager
    assert "MXFP4" in kept.report.weights


def test_other_types_convert_the_blocks(tmp_path: Path) -> None:
    folder, theirs = write(tmp_path / "blocks"), write(tmp_path / "wide", converted=True)
    for fields in ({"dtype": "float32"}, {"dtype": "float64"}, {"quantization": "w8a8_int8"}):
        assert torch.equal(
            logits_of(runner_of(folder, **fields), 33), logits_of(runner_of(theirs, **fields), 33)
        )


def test_blocks_are_counted(tmp_path: Path) -> None:
    folder, wide = write(tmp_path / "blocks"), write(tmp_path / "wide", converted=True)
    spec, plain = read_spec(folder), read_spec(wide)
    assert plain.blocks is None
    assert spec.num_parameters == plain.num_parameters
    matrices = CONFIG["num_hidden_layers"] * EXPERTS * 3 * SIZE * HIDDEN
    assert spec.blocks.kinds == ("MXFP4",)
    assert spec.blocks.num_parameters == spec.blocks.experts_parameters == matrices
    assert spec.blocks.num_bytes == spec.blocks.experts_bytes == matrices * 17 // 32
    for each, in_blocks in ((folder, True), (wide, False)):
        planned = weight_bytes(read_spec(each), 2, blocks=in_blocks)
        assert runner_of(each).report.weight_bytes == pytest.approx(
            planned, rel=0.05
        )  # panels are filled up


def outcome(config: EngineConfig, size: int, chunk: int) -> tuple[Any, list[int]]:
    rows = {"num_rows": 256, "max_slots": 8, "context_len": 128}
    prompts = {
        slot: np.random.default_rng(slot).integers(3, 131, length).tolist()
        for slot, length in enumerate((37, 1, 16, 50))
    }
    with ranks(config, size, **rows) as executor:
        groups = len(executor.executor.runner.pool.layout.groups)
        found = Driver(executor, 4, 32, groups).generate(prompts, 12, chunk=chunk)
        return found, executor.checksums


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_ranks_divide_blocks_and_sinks(tmp_path: Path, kv_dtype: str) -> None:
    folder = write(tmp_path)
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        page_size=4,
        num_threads=1,
    )
    whole = outcome(config, 1, 1 << 30)
    assert outcome(config, 2, 1 << 30) == whole
    assert outcome(config, 1, 5)[0] == whole[0]
    assert outcome(replace(config, capture=False), 2, 1 << 30) == whole


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


FIRST = "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors[f"{FIRST}down_proj_scales"][2, 3].fill_(253),
            r"'model.layers.0.mlp.experts.down_proj_scales' in .* has a scale of 253",
        ),
        (
            lambda tensors: tensors.pop(f"{FIRST}down_proj_scales"),
            r"'model.layers.0.mlp.experts.down_proj_blocks' in .* needs scales '_scales'",
        ),
        (
            lambda tensors: tensors.pop(f"{FIRST}gate_up_proj_blocks"),
            r"'model.layers.0.mlp.experts.0.gate_proj.weight' of shape .* is missing",
        ),
        (
            put(f"{FIRST}down_proj_bias", torch.zeros(EXPERTS + 1, HIDDEN)),
            r"'model.layers.0.mlp.experts.down_proj_bias' in .* does not belong",
        ),
        (
            put(f"{FIRST}gate_up_proj_bias", torch.zeros(EXPERTS, 2 * SIZE - 1)),
            r"experts.0.up_proj.bias' in .* has shape \[95\]; the config asks for \[96\]",
        ),
        (put(f"{FIRST}down_proj_bias", torch.zeros(HIDDEN)), "down_proj.bias' .* is missing"),
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.sinks"),
            r"'model.layers.1.self_attn.sinks' of shape \[4\] is missing",
        ),
        (
            put(f"{FIRST}down_proj_scales", torch.tensor(3, dtype=torch.uint8)),
            r"'model.layers.0.mlp.experts.down_proj_scales' holds U8 of shape \[\]; the codes",
        ),
        (
            lambda tensors: tensors.update(
                {f"{FIRST}down_proj_blocks": tensors[f"{FIRST}down_proj_blocks"].float()}
            ),
            r"'model.layers.0.mlp.experts.down_proj_blocks' holds F32 of shape",
        ),
        (
            put(f"{FIRST}down_proj", torch.zeros(EXPERTS, SIZE, HIDDEN)),
            r"'model.layers.0.mlp.experts.down_proj' is stored twice",
        ),
    ],
)
def test_damaged_checkpoints_are_refused(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    folder = write(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    for quantization in (None, "unquant"):
        with pytest.raises(CheckpointError, match=message):
            runner_of(folder, quantization=quantization)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "'hidden_act' = 'relu'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "'hidden_act' = 'gelu_pytorch_tanh'"),
        ({"swiglu_limit": 0}, "'swiglu_limit' = 0 .* a number above zero"),
        ({"swiglu_alpha": "1.7"}, "'swiglu_alpha' = '1.7'"),
        ({"scoring_func": "sigmoid"}, "'scoring_func' = 'sigmoid'"),
        ({"routed_scaling_factor": 2.5}, "'routed_scaling_factor' = 2.5"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = write(tmp_path)
    spec = read_spec(folder)
    with pytest.raises(CheckpointError, match=f"GptOssForCausalLM with {message}"):
        build_runner(EngineConfig(str(folder), replace(spec, config=spec.config | change)))
