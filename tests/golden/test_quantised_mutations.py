"""Damaged quantised folders of every format: each is read or refused in one line that names file and
tensor, and nothing else happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.core.model import BLOCK_KINDS
from setpoint.engine.models.weight_sources import CheckpointFiles
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.quantised_folders import FORMATS, quantise

CONFIG = next(each.config for each in GOLDENS if each.config["model_type"] == "llama") | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
}
VALUES = [None, 0, -1, 1, 2, 3, 31, 1 << 40, 0.5, "x", "", [], {}, [1], {"a": 1}, True, "re:("]
NUMBERS = [0, -1, 1, 127, 1 << 30, -(1 << 31)]
FLOATS = [0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e38, 1e-40]
NONE = "read"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), CONFIG)


def with_another_value(section: Any, rng: np.random.Generator) -> None:
    """Change one value of the config, at any depth."""
    while True:
        keys = list(section if isinstance(section, dict) else range(len(section)))
        key = keys[rng.integers(len(keys))]
        inner = section[key]
        if isinstance(inner, dict | list) and inner and rng.integers(4):
            section = inner
            continue
        if isinstance(section, dict) and not rng.integers(5):
            del section[key]
        else:
            section[key] = VALUES[rng.integers(len(VALUES))]
        return


def with_another_tensor(tensors: Tensors, rng: np.random.Generator) -> str:
    """Damage one tensor of a quantised module; returns its name."""
    names = sorted(name for name in tensors if "_proj." in name)
    name = names[rng.integers(len(names))]
    found = tensors[name]
    match rng.integers(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = found[: max(len(found) // 2, 1)].clone() if found.dim() else found[None]
        case 2:
            tensors[name] = found.reshape(-1).clone()
        case 3:
            kinds = [torch.int32, torch.uint8, torch.float16, torch.float32, torch.int64]
            tensors[name] = found.float().to(kinds[rng.integers(len(kinds))])
        case 4 if found.numel():
            flat = found.clone().reshape(-1)
            numbers = FLOATS if found.is_floating_point() else NUMBERS
            number = torch.tensor(numbers[rng.integers(len(numbers))]).to(found.dtype)
            flat[rng.integers(len(flat))] = number
            tensors[name] = flat.reshape(found.shape)
        case 5:
            bits = rng.integers(0, 256, found.numel() * found.element_size(), dtype=np.uint8)
            tensors[name] = torch.from_numpy(bits).view(found.dtype).reshape(found.shape)
        case _:
            other = names[rng.integers(len(names))]
            tensors[name], tensors[other] = tensors[other].clone(), found.clone()
    return name


def outcome(folder: Path) -> str:
    """What became of it: NONE, or the words of its refusal without names and numbers."""
    try:
        spec = read_spec(folder)
        with ExitStack() as stack:
            source = CheckpointFiles(folder, stack, with_blocks=True, matrices=spec.quantised)
            for tensor in source.quantised.values():
                outputs, inputs = tensor.shape
                for kind in tensor.kinds():
                    rows = tensor.blocks(kind).read()
                    assert rows.shape == (outputs, BLOCK_KINDS[kind].row_bytes(inputs))
                values = tensor.read()
                assert values.shape == (outputs, inputs)
                assert values.isfinite().all()
    except CheckpointError as error:
        text = str(error)
        assert "\n" not in text
        assert str(folder) in text
        return "refused"
    return NONE


def try_them(folder: Path, model: Path, form: str, count: int) -> Counter[str]:
    quantised, _ = quantise(model, folder, form)
    file, path = quantised / "model.safetensors", quantised / "config.json"
    tensors, text = load_file(file), path.read_text()
    assert outcome(quantised) == NONE
    found: Counter[str] = Counter()
    for seed in range(count):
        rng = np.random.default_rng(seed)
        config, changed = json.loads(text), dict(tensors)
        if seed % 3 == 0:
            with_another_value(config["quantization_config"], rng)
        else:
            with_another_tensor(changed, rng)
        path.write_text(json.dumps(config))
        save_file(changed, file, {"format": "pt"})
        found[outcome(quantised)] += 1
    return found


@pytest.mark.cases(8)
@pytest.mark.parametrize("form", FORMATS)
def test_damaged_folders_are_read_or_refused(tmp_path: Path, model: Path, form: str) -> None:
    found = try_them(tmp_path, model, form, 40)
    assert found["refused"]


@pytest.mark.parametrize("form", FORMATS)
def test_empty_tensors_are_refused(tmp_path: Path, model: Path, form: str) -> None:
    """Each tensor of a module that has several numbers, without any along each dimension, and all
    of them."""
    quantised, _ = quantise(model, tmp_path, form)
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    module = {name: each for name, each in tensors.items() if ".o_proj." in name and each.dim()}
    for name, found in module.items():
        for axis in range(found.dim()):
            empty = found.index_select(axis, torch.tensor([], dtype=torch.int64))
            save_file({**tensors, name: empty}, file, {"format": "pt"})
            assert outcome(quantised) == "refused", (name, axis)
            others = {each: module[each][:0].clone() for each in module}
            save_file({**tensors, **others, name: empty}, file, {"format": "pt"})
            assert outcome(quantised) == "refused", (name, axis)


@pytest.mark.parametrize("text", ["(", "a{99999999999}", "(" * 5000 + ")" * 5000])
@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("gptq", lambda text: {"dynamic": {text: {"bits": 8}}}),
        ("w4a16", lambda text: {"ignore": [f"re:{text}"]}),
    ],
)
def test_what_is_no_expression_is_refused(
    tmp_path: Path, model: Path, form: str, values: Callable[[str], dict[str, Any]], text: str
) -> None:
    quantised, _ = quantise(model, tmp_path, form)
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= values(text)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="which is invalid"):
        read_spec(quantised)


def test_zeros_of_a_symmetric_matrix_are_refused(tmp_path: Path, model: Path) -> None:
    quantised, _ = quantise(model, tmp_path, "w4a16 asymmetric")
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_zero_point.*the config calls symmetric"):
        read_spec(quantised)


@pytest.mark.parametrize(
    ("form", "order"), [("gptq desc_act", "g_idx"), ("w4a16 actorder", "weight_g_idx")]
)
def test_scattered_groups_need_the_group_of_each_input(
    tmp_path: Path, model: Path, form: str, order: str
) -> None:
    """Without it the groups would be taken for runs of neighbours, with wrong answers."""
    quantised, _ = quantise(model, tmp_path, form)
    file = quantised / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not name.endswith(order)}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"_proj.{order}' is missing"):
        read_spec(quantised)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_many_damaged_folders(tmp_path: Path, model: Path, form: str) -> None:
    found = try_them(tmp_path, model, form, 1000)
    assert found["refused"] > 400
    assert found[NONE] > 100
