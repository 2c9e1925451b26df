"""Every misfit between a checkpoint and its model is one clear error; what loads is counted right."""

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
from setpoint.engine.executor.build import EngineConfig, build_runner
from setpoint.engine.quant.cpu import PANEL
from setpoint.testing.tiny_models import write_tiny_llama

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
        (drop("model.layers.1.self_attn.k_proj.weight"), r"'model.layers.1.self_attn.k_proj.weight' of shape \[32, 48\] is missing"),
        (drop("lm_head.weight"), r"'lm_head.weight' .* is missing"),
        (put("model.layers.0.mlp.up_proj.weight", 79, 48), r"up_proj.weight' in .*model.safetensors has shape \[79, 48\].*\[80, 48\]"),
        (put("model.layers.0.self_attn.q_norm.weight", 16), r"'model.layers.0.self_attn.q_norm.weight' in .* belongs to no part"),
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
    files = {name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_shards_load_like_one_file(folder: Path) -> None:
    one = build(folder).model
    shard(folder)
    two = build(folder).model
    x = torch.randn(3, 48)
    assert torch.equal(one.lm_head(x), two.lm_head(x))


def test_missing_shard_and_missing_files(folder: Path) -> None:
    spec = read_spec(folder)
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002.safetensors, which is not in the folder"):
        build(folder, spec)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        build(folder, spec)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        build(folder, spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported; supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' lacks 'low_freq_factor'"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
    ],
)
def test_unsupported_config(folder: Path, change: dict[str, object], message: str) -> None:
    spec = read_spec(folder)
    with pytest.raises(CheckpointError, match=message):
        build(folder, replace(spec, config=spec.config | change))


def test_unsupported_architecture_names_the_supported_ones(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="'MambaForCausalLM' is not supported; supported: LlamaForCausalLM"):
        build(folder, replace(read_spec(folder), architecture="MambaForCausalLM"))


@pytest.mark.parametrize("option", [{"load_format": "pickle"}, {"dtype": "int8"}, {"attention_backend": "flash"}])
def test_unknown_option(folder: Path, option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option.values()))):
        build(folder, **option)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_weight_bytes_count_padding_and_a_tied_head_where_the_method_copies(tmp_path: Path, tied: bool, dtype: str, size: int) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=tied)
    runner = build(folder, dtype=dtype)
    shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
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
        numbers += sum(-rows[stack] % PANEL * columns[stack] for stack in rows)
    assert runner.report.weight_bytes == numbers * size


def test_dummy_weights_come_from_the_seed(tmp_path: Path, folder: Path) -> None:
    spec = read_spec(folder)
    x = torch.randn(2, 48)
    outputs = [build(tmp_path / "none", spec, load_format="dummy", seed=seed).model.lm_head(x) for seed in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
