"""The regular expressions of a quantised folder: which modules they mean, and that none holds up a
start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.folder.safetensors_file import TensorInfo
from setpoint.checkpoint.quantised.folders import as_matrices
from setpoint.core.errors import CheckpointError
from setpoint.core.quantised import QuantisedMatrix

PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in range(3)
    for module in ("self_attn.q_proj", "mlp.down_proj")
]
SIZE = 64
FOLDER = Path("folder")
Values = dict[str, Any]


def gptq(dynamic: Values, bits: dict[str, int] | None = None) -> dict[str, QuantisedMatrix]:
    """The matrices of a folder. bits: of the modules that have not 4."""
    tensors = []
    for path in PATHS:
        words = SIZE * (bits or {}).get(path, 4) // 32
        tensors += [
            TensorInfo(f"{path}.qweight", (words, SIZE), "I32"),
            TensorInfo(f"{path}.qzeros", (2, words), "I32"),
            TensorInfo(f"{path}.scales", (2, SIZE), "F16"),
        ]
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    return read(section, tensors)


def compressed(
    groups: dict[str, list[str]], ignore: list[str], symmetric: str = ""
) -> dict[str, QuantisedMatrix]:
    """groups: name -> targets. symmetric: the group that is asked for int8 activations."""
    tensors = []
    for path in PATHS:
        tensors += [
            TensorInfo(f"{path}.weight", (SIZE, SIZE), "I8"),
            TensorInfo(f"{path}.weight_scale", (SIZE, 1), "BF16"),
        ]
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ignore,
        "config_groups": {
            name: {
                "targets": targets,
                "weights": weights,
                "input_activations": inputs if name == symmetric else None,
            }
            for name, targets in groups.items()
        },
    }
    return read(section, tensors)


def read(section: Values, tensors: list[TensorInfo]) -> dict[str, QuantisedMatrix]:
    stored = {each.name: (each, FOLDER / "model.safetensors") for each in tensors}
    config = {"quantization_config": section}
    _, matrices = as_matrices(config, FOLDER / "config.json", stored)
    return {each.name.removesuffix(".weight"): each for each in matrices}


def test_the_first_expression_that_matches_a_module_has_its_settings() -> None:
    eight = {path: 8 for path in PATHS if ".0." in path or path == PATHS[3]}
    dynamic = {
        r"-:.*\.2\.": {},
        r"+:model\.layers\.0\.": {"bits": 8},
        r".*layers\.0\.": {"bits": 4},
        r"layers\.2": {"bits": 8},  # not from the beginning of the name
        r"^(?!.*self_attn).*\.1\.": {"bits": 8},
    }
    found = gptq(dynamic, eight)
    assert {path: each.codes.bits for path, each in found.items()} == {
        path: eight.get(path, 4) for path in PATHS
    }


def test_a_name_comes_before_an_expression_and_that_before_all_linear_layers() -> None:
    groups = {
        "others": ["Linear"],
        "rounded": [r"re:^(?!.*mlp)", PATHS[1]],
        "named": [PATHS[0], r"re:.*q_proj"],
    }
    found = compressed(groups, ["lm_head", r"re:^(?!model\.layers)"], symmetric="rounded")
    rounded = [path for path, each in found.items() if each.activations]
    assert sorted(rounded) == sorted([PATHS[1], PATHS[2], PATHS[4]])


@pytest.mark.parametrize("ignore", [r"re:.*\.1\.self_attn", PATHS[2]])
def test_codes_of_an_ignored_module_are_refused(ignore: str) -> None:
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.q_proj.*the config ignores"):
        compressed({"group_0": ["Linear"]}, [ignore])
    with pytest.raises(CheckpointError, match="belongs to a module of no group of the config"):
        compressed({"group_0": [r"re:.*self_attn"]}, [])


BACKWARD = "((.+)+)+!"
"""Python tries every division of a name into parts."""
RANGES = "(?i)" + r"[\x00-\uffff]" * 20_000
"""Python compiles each range character by character."""


@pytest.mark.cases(2)
@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", [BACKWARD, RANGES], ids=["backward", "ranges"])
@pytest.mark.parametrize(
    ("load", "key"),
    [
        (lambda text: gptq({"x": {}, text: {"bits": 8}}), "dynamic"),
        (lambda text: compressed({"a": ["Linear"]}, ["re:x", f"re:{text}"]), "ignore"),
        (lambda text: compressed({"a": [f"re:{text}"]}, []), "config_groups.a.targets"),
    ],
    ids=["dynamic", "ignore", "targets"],
)
def test_an_expression_that_never_ends_is_refused(
    load: Callable[[str], object], key: str, text: str
) -> None:
    """Red before: the start never ended."""
    with pytest.raises(CheckpointError, match=r"which takes more than 0\.8 s of CPU time") as error:
        load(text)
    assert f"{FOLDER / 'config.json'}: 'quantization_config.{key}' has the" in str(error.value)
    assert repr(text)[:40] in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.full
@pytest.mark.timeout(120)
def test_many_slow_expressions_are_refused_together() -> None:
    slow = {f"{RANGES[: 4 + 13 * 100]}{number}": {"bits": 8} for number in range(1000)}
    with pytest.raises(CheckpointError, match=r"10 s with those before it"):
        gptq(slow)
