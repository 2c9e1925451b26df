"""Every misfit between a checkpoint and its model is one clear error; what loads is counted
right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError, ConfigError
from setpoint.core.model import ModelSpec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.cpu.library import load
from setpoint.engine.quant.cpu_linear import PANEL
from setpoint_testing.tiny_models import write_tiny_llama

Tensors = dict[str, np.ndarray]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path)


def build(folder: Path, spec: ModelSpec | None = None, **more: object):
    options = {"dtype": "float32", "kv_dtype": "float32", "num_threads": 1} | more
    return build_runner(EngineConfig(str(folder), spec or read_spec(folder), **options))


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("model.layers.1.self_attn.k_proj.weight"),
            r"'model.layers.1.self_attn.k_proj.weight' of shape \[32, 48\] is missing",
        ),
        (drop("lm_head.weight"), r"'lm_head.weight' .* is missing"),
        (
            put("model.layers.0.mlp.up_proj.weight", 79, 48),
            r"up_proj.weight' in .*model.safetensors has shape \[79, 48\].*\[80, 48\]",
        ),
        (
            put("model.layers.0.self_attn.q_norm.weight", 16),
            r"'model.layers.0.self_attn.q_norm.weight' in .* does not belong to this architecture",
        ),
    ],
)
def test_misfit_is_named(folder: Path, change: Callable[[Tensors], object], message: str) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        build(folder, replace(read_spec(folder), tie_embeddings=False))


def test_harmless_extra_tensors_load(folder: Path) -> None:
    edit(folder, put("model.layers.0.self_attn.rotary_emb.inv_freq", 8))
    build(folder)
    # A tied model's file may still carry the head.
    build(folder, replace(read_spec(folder), tie_embeddings=True))


@pytest.mark.parametrize("keep", [0, 5, 300, 5000])
def test_truncated_file(folder: Path, keep: int) -> None:
    spec = read_spec(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        build(folder, spec)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {
        name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(names)
    }
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_shards_load_like_one_file(folder: Path) -> None:
    one = build(folder).model
    shard(folder)
    two = build(folder).model
    x = torch.randn(3, 48)
    assert torch.equal(one.lm_head.packed(x), two.lm_head.packed(x))


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shard(folder)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "lm_head.weight": np.zeros((4, 4), np.float32)}, second)
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' is both in .*1-of.* and in .*2-of"
    ):
        build(folder)


def test_codes_of_a_quantised_checkpoint_are_no_weights(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.int8)}))
    with pytest.raises(
        CheckpointError, match=rf"'{name}' in .* holds torch.int8, which is no type"
    ):
        build(folder)


def test_missing_shard_and_missing_files(folder: Path) -> None:
    spec = read_spec(folder)
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names",
    ):
        build(folder, spec)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        build(folder, spec)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        build(folder, spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "spiral"}},
            "'spiral' is not supported; supported: default, linear, dynamic, yarn",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "'mrope' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "'llama3' lacks 'low_freq_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}},
            "'longrope' lacks 'long_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "'short_factor' must be a list of 8 positive numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": "2"}},
            "'yarn' in config.json: 'factor' must be a positive number in the range of fp32, not '2'",
        ),
        ({"rope_theta": -1}, "'rope_theta' must be a positive number in the range of fp32, not -1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "differ between kinds of layers are not supported",
        ),
        ({"partial_rotary_factor": 0.7}, "must leave an even part of 16 dimensions, not 11"),
        (
            {"partial_rotary_factor": 0.5},
            "'partial_rotary_factor' = 0.5 in config.json is not supported",
        ),
        (
            {"hidden_act": "gelu"},
            "LlamaForCausalLM with 'hidden_act' = 'gelu' in config.json is not supported: .* silu",
        ),
        ({"attention_bias": "yes"}, "'attention_bias' = 'yes' .* it must be true or false"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' = 0 .* it must be a number above zero"),
        ({"sliding_window": 64}, "'sliding_window' = 64 in config.json is not supported"),
        ({"num_local_experts": 8}, "'num_local_experts' = 8"),
    ],
)
def test_unsupported_config(folder: Path, change: dict[str, object], message: str) -> None:
    spec = read_spec(folder)
    with pytest.raises(CheckpointError, match=message):
        build(folder, replace(spec, config=spec.config | change))


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("MambaForCausalLM", ""),
        ("GraniteMoeForCausalLM", " (it is a mixture of experts of another kind)"),
        ("PhiMoEForCausalLM", " (it is a mixture of experts of another kind)"),
    ],
)
def test_unsupported_architecture_names_the_supported_ones(
    folder: Path, architecture: str, why: str
) -> None:
    message = (
        re.escape(f"'{architecture}' is not supported{why}; supported: ") + ".*LlamaForCausalLM, "
    )
    with pytest.raises(CheckpointError, match=message):
        build(folder, replace(read_spec(folder), architecture=architecture), model_impl="setpoint")


def test_neutral_values_of_keys_that_nobody_reads_are_fine(folder: Path) -> None:
    spec = read_spec(folder)
    neutral = {
        "sliding_window": None,
        "num_experts": 0,
        "logit_scale": 1,
        "is_causal": True,
        "layer_types": None,
    }
    build(folder, replace(spec, config=spec.config | neutral))


def test_stacked_tensors_load_like_their_parts(folder: Path) -> None:
    x = torch.randn(3, 48)
    apart = [layer.self_attn.qkv_proj.packed(x) for layer in build(folder).model.model.layers]

    def stack(tensors: Tensors) -> None:
        for layer in range(2):
            rows = [
                tensors.pop(f"model.layers.{layer}.self_attn.{name}_proj.weight") for name in "qkv"
            ]
            tensors[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate(rows)

    edit(folder, stack)
    together = [layer.self_attn.qkv_proj.packed(x) for layer in build(folder).model.model.layers]
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
    edit(folder, put("model.layers.0.self_attn.k_proj.weight", 32, 48))
    with pytest.raises(
        CheckpointError, match=r"k_proj.weight' in .* does not belong to this architecture"
    ):
        build(folder)


@pytest.mark.parametrize(
    "option",
    [
        {"load_format": "pickle"},
        {"dtype": "int8"},
        {"attention_backend": "flash"},
        {"quantization": "q5"},
    ],
)
def test_unknown_option(folder: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option.values()))):
        build(folder, **option)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_weight_bytes_count_padding_and_a_tied_head_where_the_method_copies(
    tmp_path: Path, tied: bool, dtype: str, size: int
) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    runner = build(folder, dtype=dtype)
    shapes = {
        name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()
    }
    numbers = sum(prod(shape) for shape in shapes.values())
    if tied and runner.report.linear != "plain":
        numbers += prod(shapes["model.embed_tokens.weight"])
    if runner.report.linear == "cpu":
        # Stacked siblings share their panels.
        rows: dict[str, int] = {"lm_head": shapes["model.embed_tokens.weight"][0]}
        columns = {"lm_head": shapes["model.embed_tokens.weight"][1]}
        for name, shape in shapes.items():
            if "proj" in name:
                stack = re.sub("[qkv]_proj", "qkv", re.sub("(gate|up)_proj", "gate_up", name))
                rows[stack] = rows.get(stack, 0) + shape[0]
                columns[stack] = shape[1]
        whole = (
            load().k_multiple * 4 // size if dtype == "bfloat16" else 1
        )  # numbers of K that panels hold a multiple of
        for stack, k in columns.items():
            numbers += (rows[stack] + -rows[stack] % PANEL) * (k + -k % whole) - rows[stack] * k
    assert runner.report.weight_bytes == numbers * size


def test_dummy_weights_come_from_the_seed(tmp_path: Path, folder: Path) -> None:
    spec = read_spec(folder)
    x = torch.randn(2, 48)
    outputs = [
        build(tmp_path / "none", spec, load_format="dummy", seed=seed).model.lm_head.packed(x)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
