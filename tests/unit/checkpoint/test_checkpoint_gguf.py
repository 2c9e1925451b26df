"""GGUF files: read with every length checked, converted to exactly the weights they hold."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf_cases import MODEL, convert, load, write

from setpoint.checkpoint.gguf import convert as conversion
from setpoint.checkpoint.gguf.architectures import decoder_of
from setpoint.checkpoint.gguf.config_json import read_config
from setpoint.checkpoint.gguf.header import GGUFFile
from setpoint.core.errors import CheckpointError
from setpoint_testing import gguf_families, tiny_gguf

QUANTISABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
READ_ONLY = (
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ1_S",
    "IQ1_M",
    "IQ4_NL",
    "IQ4_XS",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "setpoint" / "models"


def to_bf16(values: np.ndarray) -> np.ndarray:
    return gguf.dequantize(gguf.quantize(values, Kind.BF16), Kind.BF16)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.BF16, "bfloat16")]
)
@pytest.mark.parametrize("tie", [True, False])
def test_float_files_come_back_bit_for_bit(
    tmp_path: Path, kind: Kind, dtype: str, tie: bool
) -> None:
    model = tiny_gguf.TinyLlama(tie=tie)
    folder = convert(write(tmp_path / "m.gguf", model=model, kind=kind))
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == dtype
    assert config["tie_word_embeddings"] is tie
    rounded = {
        "float32": lambda x: x,
        "float16": lambda x: x.astype(np.float16).astype(np.float32),
        "bfloat16": to_bf16,
    }[dtype]
    originals, loaded = model.weights(), load(folder)
    assert loaded.keys() == originals.keys()
    for name, original in originals.items():
        np.testing.assert_array_equal(loaded[name], rounded(original), err_msg=name)


@pytest.mark.parametrize("name", QUANTISABLE)
def test_quantised_files_come_back_within_the_quantisation_error(tmp_path: Path, name: str) -> None:
    kind = Kind[name]
    loaded = load(convert(write(tmp_path / "m.gguf", kind=kind)))
    for key, original in MODEL.weights().items():
        # Rows are quantised one by one, so a permutation of rows does not change what a row
        # becomes.
        expected = (
            original if original.ndim == 1 else gguf.dequantize(gguf.quantize(original, kind), kind)
        )
        np.testing.assert_array_equal(loaded[key], to_bf16(expected), err_msg=key)
        step = 2 ** -int(name[1])  # bits of the type; blocks span at most ±max
        assert np.abs(loaded[key] - original).max() <= np.abs(original).max() * 2.1 * step


@pytest.mark.parametrize("name", READ_ONLY)
def test_every_type_the_gguf_package_reads_is_converted(tmp_path: Path, name: str) -> None:
    model = tiny_gguf.TinyLlama(num_layers=1, hidden_size=256, intermediate_size=256)
    block = tiny_gguf.random_blocks((256, 256), Kind[name])
    path = write(tmp_path / "m.gguf", model=model, raw={"blk.0.attn_q.weight": (block, Kind[name])})
    loaded = load(convert(path))["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(
        tiny_gguf.permuted(loaded, model.num_heads), to_bf16(gguf.dequantize(block, Kind[name]))
    )


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    block = tiny_gguf.random_blocks((MODEL.hidden_size, MODEL.hidden_size), Kind.Q8_1)
    path = write(tmp_path / "m.gguf", raw={"blk.0.attn_q.weight": (block, Kind.Q8_1)})
    refused(path, "'blk.0.attn_q.weight' has type Q8_1")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    block = np.full(
        (MODEL.hidden_size, MODEL.hidden_size // 32 * 18), 0x7F, np.uint8
    )  # float16 scales of NaN
    refused(
        write(tmp_path / "m.gguf", raw={"blk.0.attn_q.weight": (block, Kind.Q4_0)}), "not finite"
    )


def refused(path: Path, *words: str) -> None:
    """Converting ``path`` fails with one line that names the file and holds ``words``, and leaves
    no folder behind."""
    with pytest.raises(CheckpointError) as caught:
        convert(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message
    models = Path(os.environ["XDG_CACHE_HOME"]) / "setpoint" / "models"
    assert all(entry.suffix == ".lock" for entry in models.glob(f"{path.stem}-*"))


def test_config_holds_what_the_metadata_says(tmp_path: Path) -> None:
    folder = convert(
        write(
            tmp_path / "m.gguf",
            keys={"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 500000.0},
        )
    )
    config = json.loads((folder / "config.json").read_text())
    assert (
        config["rms_norm_eps"] == 1e-6
    )  # the shortest decimal, not the float32's 9.999999974752427e-07
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
        "rope_theta": 500000.0, "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected


def test_every_token_that_ends_a_turn_is_listed(tmp_path: Path) -> None:
    folder = convert(
        write(
            tmp_path / "m.gguf",
            keys={"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5},
        )
    )
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        0,
        5,
        2,
    ]  # 2 is <|im_end|>


def test_rope_scaling_is_kept_and_an_unknown_one_refused(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = convert(write(tmp_path / "m.gguf", keys=keys))
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    keys["llama.rope.scaling.type"] = "yarn"
    more = {"original_context_length": 64, "yarn_beta_fast": 16.0, "yarn_attn_factor": 1.5}
    named = {f"llama.rope.scaling.{key}": value for key, value in more.items()}
    folder = convert(write(tmp_path / "n.gguf", keys=keys | named))
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "attention_factor": 1.5,
    }
    keys["llama.rope.scaling.type"] = "dynamic"
    refused(write(tmp_path / "o.gguf", keys=keys), "'dynamic'")


def test_any_factors_of_frequencies_are_kept(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    folder = convert(write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}))
    scaling = json.loads((folder / "config.json").read_text())["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    assert scaling["attention_factor"] == 1.0
    assert scaling["long_factor"] == scaling["short_factor"]
    np.testing.assert_array_equal(np.float32(scaling["long_factor"]), factors)
    factors[3] = np.nan
    bad = write(tmp_path / "n.gguf", tensors={"rope_freqs.weight": factors})
    refused(bad, "'rope_freqs.weight' has values that are no numbers above zero")


@pytest.mark.parametrize(
    ("arch", "num_layers", "scalar"), [("gemma2", 4, 64), ("gemma2", 46, 32), ("gemma3", 62, 32)]
)
def test_gemmas_largest_models_scale_attention_by_their_width(
    tmp_path: Path, arch: str, num_layers: int, scalar: int
) -> None:
    model = "gemma2" if arch == "gemma2" else "gemma3"
    keys = gguf_families.metadata(model) | {
        f"{arch}.block_count": num_layers,
        f"{arch}.embedding_length": 128,
    }
    tensors = {"token_embd.weight": np.zeros((320, 128), np.float32)}
    with GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", tensors, keys, arch=arch)) as file:
        config = read_config(file, decoder_of(file))
    assert config["query_pre_attn_scalar"] == scalar
    assert len(config["layer_types"]) == num_layers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "granite"}, "architecture 'granite'"),
        ({"drop": ("llama.block_count",)}, "'llama.block_count' is missing"),
        ({"drop": ("tokenizer.ggml.tokens",)}, "'tokenizer.ggml.tokens' is missing"),
        ({"drop": ("tokenizer.ggml.merges",)}, "'tokenizer.ggml.merges' is missing"),
        ({"drop": ("token_embd.weight",)}, "'token_embd.weight' is missing"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "'blk.1.ffn_up.weight' is missing"),
        ({"keys": {"llama.block_count": "two"}}, "'llama.block_count' is str, not int"),
        ({"keys": {"llama.block_count": 1}}, "does not belong"),
        ({"keys": {"llama.block_count": 3}}, "'blk.2.attn_norm.weight' is missing"),
        (
            {"keys": {"llama.feed_forward_length": 128}},
            "of shape (96, 64); the metadata asks for (128, 64)",
        ),
        ({"keys": {"llama.attention.head_count_kv": 3}}, "cannot share"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "rope.dimension_count"),
        ({"keys": {"llama.expert_count": 8}}, "'llama.expert_used_count' is missing"),
        ({"keys": {"split.count": 3}}, "NAME-00001-of-00003.gguf"),
        ({"keys": {"general.type": ["model"]}}, "'general.type' is list, not str"),
        ({"keys": {"general.alignment": 24}}, "general.alignment is 24"),
        ({"keys": {"tokenizer.ggml.model": "bert"}}, "tokenizer 'bert'"),
        ({"keys": {"tokenizer.ggml.token_type": [1.0] * 320}}, "a list of whole numbers"),
        ({"keys": {"tokenizer.ggml.pre": "afmoe"}}, "pre-tokenizer 'afmoe'"),
        ({"keys": {"tokenizer.ggml.merges": ["h e", "zz top"]}}, "no tokenizer can be made"),
        ({"keys": {"tokenizer.ggml.eos_token_id": 999}}, "eos token id 999"),
        ({"keys": {"tokenizer.ggml.tokens": ["a", "a"]}}, "vocabulary is inconsistent"),
        ({"keys": {"tokenizer.ggml.tokens": [f"t{i}" for i in range(321)]}}, "for 320 embeddings"),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "'blk.0.attn_q.bias'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_served_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    refused(write(tmp_path / "m.gguf", **change), words)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content, words in (
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), f"{1 << 60} tensors"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 0, 1 << 60),
            f"{1 << 60} items of arrays",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 0),
            "array of type 9",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99),
            "unknown metadata type 99",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"\xff", 4), "not UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 77, 0),
            "unknown ggml type 77",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 9, 32, 0, 0),
            "9 dimensions",
        ),
    ):
        path.write_bytes(content)
        refused(path, words)
    refused(tmp_path, "Cannot read")


def test_a_truncated_file_is_an_error_wherever_it_ends(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", kind=Kind.Q4_0).read_bytes()
    path = tmp_path / "cut.gguf"
    ends = [*range(4, 200, 7), *np.linspace(200, len(whole) - 64, 60, dtype=int), len(whole) - 64]
    for end in ends:  # the last bytes may be padding
        path.write_bytes(whole[:end])
        refused(path, "truncated")


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "whole.gguf", kind=Kind.Q4_0)
    with GGUFFile(path) as file:
        first, second, *_ = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    name = second.name.encode()
    data = bytearray(path.read_bytes())
    # After a tensor's name come its number of dimensions, these, its type and its offset.
    offset = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    offset += 8 * len(second.shape) + 4
    data[offset : offset + 8] = struct.pack("<Q", 0)
    path.write_bytes(data)
    refused(path, f"tensors '{first.name}' and '{second.name}' overlap")


def test_a_damaged_header_never_hangs_or_crashes(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", kind=Kind.Q4_0).read_bytes()
    with GGUFFile(tmp_path / "whole.gguf") as file:
        header_bytes = min(tensor.offset for tensor in file.tensors.values())
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(4, header_bytes, 3):
            damaged[at] = int(rng.integers(256))
        path.write_bytes(damaged)
        try:
            with GGUFFile(path) as file:
                conversion._plan(file)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 30  # many flips only change a token's text


def header(*parts: bytes, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(parts)


KEY = struct.pack("<Q4s", 4, b"some")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header(struct.pack("<Q", 1 << 30), num_keys=1), "a metadata key"),
        (header(KEY, struct.pack("<IQ", 8, 1 << 30), num_keys=1), "bytes for a text"),
        (header(KEY, struct.pack("<IIQ", 9, 0, 1 << 26), num_keys=1), "items of arrays"),
        (header(KEY, struct.pack("<IIQ", 9, 8, 1 << 24), num_keys=1), "items of arrays"),
        (header(struct.pack("<Q", 1 << 30), num_tensors=1), "a tensor's name"),
        (header(num_tensors=1 << 30), "tensors"),
        (header(num_keys=1 << 30), "metadata keys"),
    ],
)
def test_one_wrong_length_costs_no_memory(tmp_path: Path, content: bytes, words: str) -> None:
    """The file is as long as it claims to be."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, 1100 << 20)
    tracemalloc.start()
    try:
        refused(path, words, "its header claims")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_messages_hold_an_excerpt_of_what_the_file_says(tmp_path: Path) -> None:
    long = "x" * 100_000
    for how in (
        {"arch": long},
        {"keys": {"tokenizer.ggml.model": long}},
        {"keys": {"tokenizer.ggml.pre": long}},
    ):
        with pytest.raises(CheckpointError) as caught:
            convert(write(tmp_path / "m.gguf", **how))
        assert "(100000 characters)" in str(caught.value)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", -1.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("context_length", 0),
        ("context_length", 1 << 31),
    ],
)
def test_a_number_that_cannot_be_is_named_by_file_and_key(
    tmp_path: Path, key: str, value: float
) -> None:
    refused(write(tmp_path / "m.gguf", keys={f"llama.{key}": value}), f"llama.{key} is ")


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_a_norm_in_blocks_is_converted(tmp_path: Path, kind: Kind) -> None:
    norm = np.linspace(0.5, 2, MODEL.hidden_size, dtype=np.float32)
    blocks = gguf.quantize(norm.reshape(1, -1), kind)
    path = write(
        tmp_path / "m.gguf",
        tensors={"output_norm.weight": norm},
        raw={"output_norm.weight": (blocks.reshape(-1), kind)},
        kind=kind,
    )
    expected = to_bf16(gguf.dequantize(blocks, kind)[0])
    np.testing.assert_array_equal(load(convert(path))["model.norm.weight"], expected)
