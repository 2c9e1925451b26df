"""What is refused in a GGUF file of a mixture of experts, by the name of the tensor or key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from setpoint.checkpoint.gguf.convert import converted_folder
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint_testing import tiny_gguf
from setpoint_testing.gguf_families import metadata, write_model

UP = "blk.1.ffn_up_exps.weight"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    path, _ = write_model(tmp_path_factory.mktemp("whole"), "qwen3moe", lambda name: Kind.F32)
    with GGUFFile(path) as file:
        return {
            name: file.rows(tensor).view(np.float32).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }


def refusal(path: Path, tensors: dict[str, np.ndarray], keys: dict[str, Any]) -> str:
    tiny_gguf.write(path, tensors, metadata("qwen3moe") | keys, arch="qwen3moe")
    with pytest.raises(CheckpointError) as caught:
        converted_folder(path, log=lambda line: None)
    return str(caught.value)


@pytest.mark.parametrize("name", [UP, "blk.0.ffn_gate_inp.weight", "blk.0.attn_k_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: dict, name: str) -> None:
    rest = {key: value for key, value in tensors.items() if key != name}
    assert f"tensor {name!r} is missing" in refusal(tmp_path / "m.gguf", rest, {})


def test_a_tensor_for_each_expert_is_named_as_the_old_layout(tmp_path: Path, tensors: dict) -> None:
    old = {name: value for name, value in tensors.items() if "_exps" not in name}
    for name in tensors.keys() - old.keys():
        for number, expert in enumerate(tensors[name]):
            old[name.replace("_exps.", f".{number}.")] = expert
    assert "has a tensor for each expert" in refusal(tmp_path / "m.gguf", old, {})


def test_an_expert_too_few_is_named(tmp_path: Path, tensors: dict) -> None:
    message = refusal(tmp_path / "m.gguf", tensors | {UP: tensors[UP][:4]}, {})
    assert f"{UP!r} is of shape (4, 256, 256); the metadata asks for (5, 256, 256)" in message


def test_a_layer_with_experts_and_a_dense_mlp_is_refused(tmp_path: Path, tensors: dict) -> None:
    more = {"blk.0.ffn_up.weight": tensors[UP][0]}
    message = refusal(tmp_path / "m.gguf", tensors | more, {})
    assert "tensor 'blk.0.ffn_up.weight' (1 in all) does not belong to a qwen3_moe model" in message


def test_experts_that_are_there_twice_are_refused(tmp_path: Path, tensors: dict) -> None:
    path = tmp_path / "m.gguf"
    other = "blk.0.ffn_up_exps.weight"
    tiny_gguf.write(path, tensors, metadata("qwen3moe"), arch="qwen3moe")
    path.write_bytes(path.read_bytes().replace(UP.encode(), other.encode()))
    with pytest.raises(CheckpointError, match=rf"'{other}' .* appears twice"):
        converted_folder(path, log=lambda line: None)


def test_leading_ones_are_no_part_of_a_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate of the shared expert is one row: llama.cpp's converter once wrote it as a vector."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, _ = write_model(tmp_path, "qwen2moe", lambda name: Kind.F32)
    with GGUFFile(path) as file:
        tensors = {
            name: file.rows(tensor).view(np.float32).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
    gates = {name: tensor[0] for name, tensor in tensors.items() if "inp_shexp" in name}
    assert all(tensors[name].shape == (1, 256) for name in gates)
    old = tiny_gguf.write(
        tmp_path / "old.gguf", tensors | gates, metadata("qwen2moe"), arch="qwen2moe"
    )
    weights = [
        (converted_folder(each, log=lambda line: None) / "model.safetensors").read_bytes()
        for each in (path, old)
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"expert_count": 6}, "'blk.0.ffn_gate_inp.weight' is of shape (5, 256)"),
        ({"expert_used_count": 6}, "expert_used_count is 6, but there are 5 experts"),
        ({"expert_used_count": 0}, "expert_used_count is 0, but there are 5 experts"),
        ({"expert_feed_forward_length": 128}, "the metadata asks for (5, 128, 256)"),
        ({"expert_gating_func": 2}, "expert_gating_func = 2 is not supported"),
        ({"expert_weights_norm": False}, "expert_weights_norm = False is not supported"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale = 2.5 is not supported"),
    ],
)
def test_metadata_that_disagrees_is_refused(
    tmp_path: Path, tensors: dict, keys: dict[str, Any], words: str
) -> None:
    named = {f"qwen3moe.{key}": value for key, value in keys.items()}
    assert words in refusal(tmp_path / "m.gguf", tensors, named)
