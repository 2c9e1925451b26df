"""A model folder may hold anything: whatever is wrong with it ends start-up with one line that
names the file, before torch is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.folder.safetensors_file import TensorInfo, read_header
from setpoint.checkpoint.quantised import mxfp4
from setpoint.checkpoint.spec import read_spec
from setpoint.config.environment import read_environment
from setpoint.config.options import Options
from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import parse_json
from setpoint.core.model import MXFP4_SUFFIXES
from setpoint.engine.models.model_config import ConfigReader
from setpoint.frontend.text.processor import TextProcessor
from setpoint.launch.parent.configuration import settle
from setpoint_testing.byte_tokenizer import write_byte_tokenizer
from setpoint_testing.tiny_models import write_tiny_llama

DEEP = "[" * 100_000 + "]" * 100_000
BIG = "1" + "0" * 30
Break = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path, vocab_size=260)
    write_byte_tokenizer(tmp_path)
    return tmp_path


def read(folder: Path) -> dict[str, float]:
    """All that the parent process reads of a folder -> what it recommends for sampling."""
    served = settle(
        Options.of(model_path=str(folder), max_total_tokens=512),
        read_environment({}),
        frozenset({"max_total_tokens"}),
    )
    TextProcessor.from_folder(served.tokenizer, served.template).close()
    return dict(served.sampling)


def write(name: str, content: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def set_key(name: str, key: str, raw: str) -> Break:
    """``raw`` is JSON, or what passes for it."""

    def change(folder: Path) -> None:
        path = folder / name
        keys = json.loads(path.read_text()) if path.exists() else {}
        members = [
            f"{json.dumps(name)}: {json.dumps(value)}"
            for name, value in keys.items()
            if name != key
        ]
        path.write_text("{" + ", ".join([*members, f'"{key}": {raw}']) + "}")

    return change


def config(key: str, raw: str) -> Break:
    return set_key("config.json", key, raw)


def generation(key: str, raw: str) -> Break:
    return set_key("generation_config.json", key, raw)


def a_folder(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def index(content: Any) -> Break:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )

    return change


def rope(kind: str, factor: str) -> Break:
    return config("rope_scaling", f'{{"rope_type": "{kind}", "factor": {factor}}}')


BROKEN: dict[str, tuple[Break, str]] = {
    "config: a list": (write("config.json", "[1]"), "config.json must hold a JSON object"),
    "config: nested": (
        write("config.json", DEEP),
        "config.json is not valid JSON: it is nested too deeply",
    ),
    "config: bytes": (write("config.json", b"\xff{}"), "config.json is not UTF-8 text"),
    "config: a folder": (a_folder("config.json"), "has no config.json"),
    "hidden_size huge": (
        config("hidden_size", "1000000000000"),
        "'hidden_size' is 1000000000000; the largest supported value",
    ),
    "hidden_size beyond 64 bits": (config("hidden_size", BIG), "'hidden_size' is 1000"),
    "vocab_size huge": (
        config("vocab_size", "9000000000000000000"),
        "'vocab_size' is 9000000000000000000; the largest supported",
    ),
    "intermediate_size NaN": (
        config("intermediate_size", "NaN"),
        "'intermediate_size' must be a positive integer, not 'NaN'",
    ),
    "layers huge": (
        config("num_hidden_layers", "200000"),
        "'num_hidden_layers' is 200000; the largest supported value is 4096",
    ),
    "head_dim huge": (
        config("head_dim", "1000000000"),
        "'head_dim' is 1000000000; the largest supported",
    ),
    "heads huge": (
        config("num_attention_heads", "1000000000"),
        "'num_attention_heads' is 1000000000; the largest supported",
    ),
    "context huge": (
        config("max_position_embeddings", "1000000000000"),
        "'max_position_embeddings' is 1000000000000; the largest supported",
    ),
    "architecture of two lines": (
        config("architectures", '["Llama\\nForCausalLM"]'),
        "'architectures' must list the model's class",
    ),
    "a long value": (config("tie_word_embeddings", f'"{"x" * 9999}"'), "…"),
    "rope factor huge": (rope("linear", "1e308"), "needs a factor of at least 1 and at most"),
    "rope factor infinite": (rope("yarn", "1e999"), "needs a factor of at least 1 and at most"),
    "generation: a folder": (a_folder("generation_config.json"), "generation_config.json"),
    "generation: broken": (
        write("generation_config.json", '{"a":'),
        "generation_config.json is not valid JSON",
    ),
    "generation: temperature a word": (
        generation("temperature", '"hot"'),
        "generation_config.json: temperature",
    ),
    "generation: temperature NaN": (generation("temperature", "NaN"), "--sampling-defaults openai"),
    "generation: temperature negative": (
        generation("temperature", "-1"),
        "generation_config.json: temperature",
    ),
    "generation: top_k a fraction": (generation("top_k", "1.5"), "top_k"),
    "generation: top_p 0": (generation("top_p", "0"), "generation_config.json: top_p must be"),
    "generation: repetition_penalty 3": (
        generation("repetition_penalty", "3"),
        "generation_config.json: repetition_penalty must be",
    ),
    "tokenizer: a folder": (a_folder("tokenizer.json"), "No tokenizer.json"),
    "tokenizer: nested": (
        write("tokenizer.json", DEEP),
        "tokenizer.json is not valid JSON: it is nested too deeply",
    ),
    "tokenizer: bytes": (write("tokenizer.json", b"\xff"), "tokenizer.json is not UTF-8 text"),
    "tokenizer_config: a folder": (a_folder("tokenizer_config.json"), "Cannot read"),
    "tokenizer_config: nested": (
        write("tokenizer_config.json", DEEP),
        "tokenizer_config.json is not valid JSON: it is nested too deeply",
    ),
    "tokenizer_config: bytes": (
        write("tokenizer_config.json", b"\xff"),
        "tokenizer_config.json is not UTF-8 text",
    ),
    "template: a number": (
        set_key("tokenizer_config.json", "chat_template", "5"),
        "'chat_template' must be text",
    ),
    "template: a list of numbers": (
        set_key("tokenizer_config.json", "chat_template", "[5]"),
        "'chat_template' must be text",
    ),
    "template file: bytes": (
        write("chat_template.jinja", b"\xff"),
        "chat_template.jinja is not UTF-8 text",
    ),
    "template file: a folder": (a_folder("chat_template.jinja"), "Cannot read"),
    "weights: a folder": (a_folder("model.safetensors"), "has no safetensors weights"),
    "weights: nested header": (
        write("model.safetensors", len(DEEP).to_bytes(8, "little") + DEEP.encode()),
        "model.safetensors has a damaged safetensors header",
    ),
    "index: nested": (index(DEEP), "index.json is not valid JSON: it is nested too deeply"),
    "index: a list": (index([]), "index.json must hold a JSON object"),
    "index: numbers": (index({"weight_map": {"a": 5}}), "must name a file of this folder"),
    "index: an absolute path": (
        index({"weight_map": {"a": "/etc/passwd"}}),
        "must name a file of this folder",
    ),
    "index: a path that climbs": (
        index({"weight_map": {"a": "../a.safetensors"}}),
        "must name a file of this folder",
    ),
    "index: a name with a line end": (
        index({"weight_map": {"a": "a\nb"}}),
        "must name a file of this folder",
    ),
    "index: a missing file": (index({"weight_map": {"a": "b.safetensors"}}), "lacks b.safetensors"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_one_line(folder: Path, what: str) -> None:
    change, message = BROKEN[what]
    change(folder)
    with pytest.raises(CheckpointError) as refusal:
        read(folder)
    text = str(refusal.value)
    assert message in text
    assert str(folder) in text
    assert "\n" not in text
    assert len(text) < 400 + len(str(folder))


def test_the_folder_is_read_while_it_is_whole(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 0}')
    assert read(folder) == {
        "temperature": 0.5,
        "top_k": -1,
    }  # 0 is transformers' word for the whole vocabulary


def test_numbers_that_are_none_stay_text() -> None:
    assert parse_json("[NaN, -Infinity, 1e999, 1e30, 7]") == ["NaN", "-Infinity", "1e999", 1e30, 7]


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "1e999", BIG * 11])
def test_a_declaration_refuses_them(folder: Path, raw: str) -> None:
    config("hidden_scale", raw)(folder)
    with pytest.raises(CheckpointError, match="it must be a number above zero"):
        ConfigReader("LlamaForCausalLM", read_spec(folder).config).number("hidden_scale", 1e-6)


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "1e999", "0", "-1e-5", '"small"', "true"])
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "query_pre_attn_scalar"])
def test_numbers_of_the_computation_are_checked_while_the_config_is_read(
    folder: Path, key: str, raw: str
) -> None:
    """Red before: an engine process began, and refused them itself."""
    config(key, raw)(folder)
    with pytest.raises(CheckpointError, match=f"{key!r} must be a number above zero, not"):
        read_spec(folder)


@pytest.mark.parametrize("shape", [(2, 0), (0, 4), (0, 0)])
def test_codes_of_mxfp4_without_numbers_are_refused(shape: tuple[int, ...]) -> None:
    stored = [TensorInfo(f"a{ending}", shape, "U8") for ending in MXFP4_SUFFIXES]
    with pytest.raises(CheckpointError, match="none of them empty"):
        mxfp4.as_matrices(stored)


def test_a_tensor_of_negative_size_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        read_header(path)
