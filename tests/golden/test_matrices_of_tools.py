"""Matrices that the tools themselves wrote, with the values that they make of them
(``scripts/matrices_of_tools.py``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from setpoint.checkpoint.folder.safetensors_file import read_header
from setpoint.checkpoint.quantised.folders import as_matrices
from setpoint.engine.models.weight_sources import values_in
from setpoint_testing.quantised_folders import save

FILE = Path(__file__).with_name("matrices_of_tools.safetensors")
MODULE = "model.layers.0.mlp.up_proj"
HALF_STEP = 2.0**-8
"""Half the distance of neighbouring numbers in bf16, as a share of them, at most."""


def cases() -> dict[str, dict[str, object]]:
    """Name -> ``quantization_config``."""
    with safe_open(FILE, framework="pt") as file:
        return json.loads(file.metadata()["sections"])


CASES = cases()


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_tool(tmp_path: Path, case: str) -> None:
    with safe_open(FILE, framework="pt") as file:
        tensors = {
            name.removeprefix(f"{case}/"): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 (it is no mapping)
            if name.startswith(f"{case}/")
        }
    theirs = tensors.pop("values")
    config = {"quantization_config": CASES[case]}
    folder = save(tmp_path, {f"{MODULE}.{name}": each for name, each in tensors.items()}, config)
    weights = folder / "model.safetensors"
    stored = {each.name: (each, weights) for each in read_header(weights)}
    left, matrices = as_matrices(config, folder / "config.json", stored)
    (found,) = values_in(folder, matrices).values()
    assert [each.shape for each in left] == [theirs.shape]
    if theirs.dtype == torch.bfloat16:
        assert torch.equal(found, theirs)
    else:  # fp16, which the tool has rounded to already
        rounded = theirs.to(torch.bfloat16)
        differ = found != rounded
        assert differ.float().mean() < 0.08
        error = (found.float() - theirs.float()).abs()
        assert (error <= theirs.float().abs() * (HALF_STEP + 2.0**-11)).all()
