"""Every declared family is captured, in every form in which its weights may be stored: a server of
one starts without a line that says Fallback, and none of its steps runs eagerly."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from setpoint.checkpoint.spec import read_spec
from setpoint.core.model import BLOCKS_INT8
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.kernels.cpu.build import LEVEL_VARIABLE
from setpoint.engine.models.model_registry import MODELS
from setpoint.engine.quant.blocks import KINDS
from setpoint.engine.runner import replay_way
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.conversion import converted_under
from setpoint_testing.cpu_levels import each_level
from setpoint_testing.gguf_families import CONFIGS, mixed, write_model
from setpoint_testing.plans import allocate_rows
from setpoint_testing.quantised_folders import FORMATS, quantise

CONFIG_OF = {config["architectures"][0]: config for config in CONFIGS.values()}
CONFIG_OF["MistralForCausalLM"] = CONFIG_OF["LlamaForCausalLM"] | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
}
IN_GGUF = [*(kind for kind in KINDS if hasattr(Kind, kind)), "BF16", "F16", "F32"]
CHOSEN_BY_NAME = "C++ kernels run at the level"
"""How the Fallback begins that a test causes itself, by naming a level."""


@pytest.fixture(autouse=True)
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a capture takes little memory and time."""
    monkeypatch.setattr(replay_way, "CAPTURED_TOKENS", 8)


def why_not_captured(folder: Path, **options: Any) -> str:
    """What a server of this model would say after "Fallback"; "" if nothing."""
    options = {"page_size": 4, "num_threads": 2, **options}
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), **options))
    allocate_rows(runner, num_rows=16, max_slots=2, context_len=32)
    told = [each.what for each in runner.report.fallbacks if CHOSEN_BY_NAME not in each.what]
    if runner.why_eager:
        told.append(runner.why_eager)
    assert told or [way.name for way in runner.ways] == ["replay", "eager"]
    return "; ".join(told)


def refused(found: dict[str, str]) -> dict[str, str]:
    """The forms that are not captured, with the reasons."""
    return {form: why for form, why in found.items() if why}


def sampled(name: str, values: Iterable[Any], quick: Container[Any]) -> pytest.MarkDecorator:
    """All values, those that are not in the sample for ``make full`` only."""
    return pytest.mark.parametrize(
        name,
        [pytest.param(each, marks=() if each in quick else pytest.mark.full) for each in values],
    )


@sampled("tie", [False, True], [True])
@sampled("architecture", MODELS, ["Gemma3ForCausalLM"])
def test_folders(architecture: str, tie: bool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, CONFIG_OF[architecture] | {"tie_word_embeddings": tie})
    forms: dict[str, dict[str, Any]] = {
        "bfloat16": {},
        "float32": {"dtype": "float32", "kv_dtype": "float32"},
        "fp8 cache": {"kv_dtype": "fp8_e4m3"},
        "w8a8_int8": {"quantization": "w8a8_int8"},
    }
    found = {form: why_not_captured(folder, **options) for form, options in forms.items()}
    assert not refused(found)


@sampled("form", FORMATS, ["awq", "w8a8 dynamic", "nf4"])
@sampled("architecture", MODELS, ["Gemma3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_quantized_folders(architecture: str, form: str, tmp_path: Path) -> None:
    folder, _ = quantise(write_tiny(tmp_path, CONFIG_OF[architecture]), tmp_path, form)
    assert not why_not_captured(folder)


def kept(folder: Path, model: str, embedding: str | None, *, tie: bool) -> Path:
    """A GGUF file as a checkpoint. embedding: its kind, and the head's; None: as in a file of the
    kind Q4_K_M."""

    def kind_of(name: str) -> Kind:
        return mixed(name) if embedding is None or name.startswith("blk") else Kind[embedding]

    path, _ = write_model(folder, model, kind_of, tie_word_embeddings=tie)
    return converted_under(folder / "cache", path)


@pytest.mark.cases(6)
@sampled("tie", [False, True], [True])
@sampled("embedding", [None, *IN_GGUF], [None])
@pytest.mark.parametrize("model", CONFIGS)
def test_gguf_files(model: str, embedding: str | None, tie: bool, tmp_path: Path) -> None:
    folder = kept(tmp_path, model, embedding, tie=tie)
    forms = (None, BLOCKS_INT8)
    found = {str(form): why_not_captured(folder, quantization=form) for form in forms}
    assert not refused(found)


@pytest.mark.cases(5)
@each_level
@pytest.mark.parametrize("model", ["gemma3", "qwen3moe", "deepseek2"])
def test_levels(model: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept(tmp_path, model, None, tie=True)
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    forms = (None, BLOCKS_INT8)
    found = {str(form): why_not_captured(folder, quantization=form) for form in forms}
    assert not refused(found)
