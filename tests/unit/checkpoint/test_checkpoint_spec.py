"""config.json becomes a ModelSpec, whichever library version wrote it; what is missing or wrong is
named with its file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from setpoint.checkpoint.read_folder import read_description
from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.core.weightfiles import INDEX_NAME

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
}
NUM_PARAMETERS = 100 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64) + 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    """CONFIG with ``changes``; a change to None leaves the key out."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_spec(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_numbers_are_the_configs(folder: Path) -> None:
    spec = read_spec(folder)
    assert (spec.architecture, spec.model_type, spec.num_layers, spec.hidden_size) == (
        "LlamaForCausalLM",
        "llama",
        2,
        64,
    )
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (
        96,
        4,
        2,
        16,
    )
    assert (spec.vocab_size, spec.context_len, spec.tie_embeddings, spec.dtype) == (
        100,
        128,
        True,
        "bfloat16",
    )
    assert spec.eos_token_ids == (2,)
    assert spec.config == CONFIG
    assert spec.kv_bytes_per_token(2) == 2 * 2 * 16 * 2 * 2


def test_defaults_are_transformers(folder: Path) -> None:
    write(folder, num_key_value_heads=None, tie_word_embeddings=None, eos_token_id=None)
    spec = read_spec(folder)
    assert (spec.num_kv_heads, spec.tie_embeddings, spec.eos_token_ids) == (4, False, ())
    write(folder, head_dim=32)
    assert read_spec(folder).head_dim == 32


def test_transformers_5_spellings(folder: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    write(folder, torch_dtype=None, dtype="float16", rope_parameters=rope)
    spec = read_spec(folder)
    assert (spec.dtype, spec.context_len) == ("float16", 256)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"type": "linear", "factor": 4}, 512),
        ({"rope_type": "dynamic", "factor": 1.5}, 192),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            512,
        ),  # as Qwen's model cards say
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "longrope", "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "default"}, 128),
    ],
)
def test_context_length_under_rope_scaling(folder: Path, rope: dict[str, Any], length: int) -> None:
    write(folder, rope_scaling=rope)
    spec = read_spec(folder)
    assert spec.context_len == length
    assert spec.rope_by_context == (
        (rope.get("rope_type") or rope.get("type")) in ("dynamic", "longrope")
    )


def test_families_whose_configs_mean_something_else(folder: Path) -> None:
    rope = {"rope_type": "linear", "factor": 8.0}
    write(folder, model_type="gemma3_text", tie_word_embeddings=None, rope_scaling=rope)
    spec = read_spec(folder)
    assert (spec.tie_embeddings, spec.context_len, spec.num_rotaries) == (True, 128, 2)
    write(folder, model_type="gemma2", tie_word_embeddings=None)
    spec = read_spec(folder)
    assert (spec.tie_embeddings, spec.num_rotaries) == (True, 1)
    write(folder, model_type="gemma2", tie_word_embeddings=False)
    assert not read_spec(folder).tie_embeddings


def test_a_model_that_takes_more_than_text_is_named(folder: Path) -> None:
    write(
        folder,
        architectures=["OddForConditionalGeneration"],
        model_type="odd",
        text_config={"hidden_size": 64},
        hidden_size=None,
    )
    assert (
        "OddForConditionalGeneration, which reads more than text; only"
        " Gemma3ForConditionalGeneration" in refusal(folder)
    )
    write(folder, architectures=["Gemma3ForConditionalGeneration"], text_config=3)
    assert "'text_config' must be an object, not 3" in refusal(folder)


def test_other_names_of_the_dimensions(folder: Path) -> None:
    """GPT-2's, those of its code models, OPT's feed-forward size, and experts'."""
    sizes = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    gpt2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **dict.fromkeys(sizes)}
    write(folder, **gpt2)
    spec = read_spec(folder)
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.context_len) == (
        32,
        128,
        3,
        64,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 8)
    write(folder, **gpt2 | {"n_inner": 48, "multi_query": True})
    assert (read_spec(folder).intermediate_size, read_spec(folder).num_kv_heads) == (48, 1)
    for name in ("ffn_dim", "moe_intermediate_size"):
        write(folder, intermediate_size=None, **{name: 40})
        assert read_spec(folder).intermediate_size == 40
    write(folder, n_embd=32)
    assert read_spec(folder).hidden_size == 64, "the usual name wins"


def test_overrides_replace_keys(folder: Path) -> None:
    spec = read_spec(folder, overrides={"max_position_embeddings": 64, "num_hidden_layers": 1})
    assert (spec.context_len, spec.num_layers) == (64, 1)
    assert spec.config["num_hidden_layers"] == 1


def test_generation_config_adds_the_ids_that_end_a_turn(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert read_spec(folder).eos_token_ids == (7, 2, 9)
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    assert "generation_config.json: 'eos_token_id' must be a token id" in refusal(folder)


def test_parameters_and_dtype_come_from_the_weights(folder: Path) -> None:
    assert read_spec(folder).num_parameters == NUM_PARAMETERS  # no weights yet: from the dimensions
    write(folder, torch_dtype=None)
    assert read_spec(folder).dtype == "bfloat16"
    head = np.zeros((10, 4), np.float16)
    save_file(
        {"model.embed_tokens.weight": head, "model.norm.weight": np.zeros(4, np.float32)},
        folder / "model.safetensors",
    )
    spec = read_spec(folder)
    assert (spec.num_parameters, spec.dtype) == (44, "float16")
    save_file(
        {"model.embed_tokens.weight": head, "lm_head.weight": head}, folder / "model.safetensors"
    )
    assert read_spec(folder).num_parameters == 40  # tied: the second copy is no parameter


def test_an_index_names_the_files(folder: Path) -> None:
    for part in ("a", "b", "unused"):
        save_file({part: np.zeros(8, np.float32)}, folder / f"{part}.safetensors")
    index = folder / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert [tensor.name for tensor in read_description(folder).tensors] == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "c": "c.safetensors"}}))
    assert "lacks c.safetensors" in refusal(folder)
    index.write_text("[]")
    assert "must hold a JSON object" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": None}, "'architectures' must list"),
        ({"architectures": []}, "'architectures' must list"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be a positive integer, not '64'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be a positive integer"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' must be a positive integer"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is 3, which does not divide the"),
        ({"head_dim": 17}, "rotary positions need an even size"),
        ({"vocab_size": 1.5}, "'vocab_size'"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is missing"),
        ({"torch_dtype": "int4"}, "'dtype' must be one of"),
        (
            {"quantization_config": {"quant_method": "quark"}},
            "'quantization_config.quant_method' is 'quark', which is not supported: use the",
        ),
        ({"quantization_config": "mxfp4"}, "'quantization_config' is 'mxfp4', which is not"),
        ({"quantization_config": {}}, "'quantization_config' is {}, which is not supported"),
        ({"eos_token_id": -2}, "'eos_token_id' must be a token id"),
        ({"eos_token_id": ["x"]}, "'eos_token_id' must be a token id"),
        ({"rope_scaling": "linear"}, "'rope_scaling' must be an object"),
        *(
            ({key: value}, f"{key!r} must be an object, not {value!r}")
            for key in ("rope_scaling", "rope_parameters")
            for value in (0, "", False, [])
        ),
        ({"rope_scaling": {"a": 1}}, "'rope_scaling' must name its type, not {'a': 1}"),
        ({"rope_scaling": {"type": ""}}, "'rope_scaling' must name its type, not ''"),
        ({"rope_scaling": {"rope_type": 0, "type": "yarn"}}, "must name its type, not 0"),
        ({"rope_parameters": {"factor": 2}}, "'rope_parameters' must name its type, not {'fac"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"type": ["linear"]}}, "must name its type, not ['linear']"),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 2,
                    "original_max_position_embeddings": "4k",
                }
            },
            "of '4k'; it must be",
        ),
        (
            {"architectures": ["OddForConditionalGeneration"], "hidden_size": None},
            "OddForConditionalGeneration does not look like",
        ),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
    ],
)
def test_an_invalid_config_is_named_with_its_file(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    write(folder, **changes)
    message = refusal(folder)
    assert str(folder / "config.json") in message
    assert words in message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\ud800"])
def test_a_config_that_is_no_object_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert str(folder / "config.json") in refusal(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)


def test_a_damaged_safetensors_file_is_one_line_wherever_it_ends(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({"a": np.arange(64, dtype=np.float32)}, path)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        assert "Download it again" in refusal(folder)
    for header in (
        b"[]",
        b"{}}",
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}',
        b"\xff\xff",
    ):
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "damaged safetensors header" in refusal(folder)
    header = b'{"a": {"dtype": "F6", "shape": [1], "data_offsets": [0, 0]}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    assert "unsupported type F6" in refusal(folder)
