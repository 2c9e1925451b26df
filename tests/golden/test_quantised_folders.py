"""Folders that other tools quantised: their values, their blocks and their answers are those of the
dequantised model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.core.model import ModelSpec
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.models.weight_sources import values_in
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint.planning.memory import weight_bytes
from setpoint_testing.against_transformers import TOLERANCES, measure, write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver
from setpoint_testing.quantised_folders import FORMATS, LLAMA, MIXTURE, is_quantised, quantise
from setpoint_testing.ranks import ranks
from setpoint_testing.runners import distance, logits_of, runner_of

FUSED = next(each.config for each in GOLDENS if each.config["model_type"] == "phi3") | {
    "hidden_size": 64,
    "intermediate_size": 128,
}
"""Its folder has q, k and v in one matrix, and gate and up in another."""
GEMMA = next(each.config for each in GOLDENS if each.config["model_type"] == "gemma3_text") | {
    "intermediate_size": 128
}
ROUNDING = ("w8a8 dynamic", "w8a8 static")
"""The formats whose activations are rounded."""
EXACT = [form for form in FORMATS if form not in ROUNDING]
OF_MIXTURES = ("awq", "gptq", "w4a16 asymmetric", "w8a8 dynamic", "fp8 blocks", "nf4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny(folder / name, config)
        for name, config in (
            ("llama", LLAMA),
            ("mixture", MIXTURE),
            ("fused", FUSED),
            ("gemma", GEMMA),
        )
    }


def kinds_in(runner: ModelRunner) -> set[str]:
    return {each.blocks for each in runner.model.modules() if hasattr(each, "keep_blocks")} - {""}


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_those_that_the_tool_means(
    tmp_path: Path, models: dict[str, Path], form: str
) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, form)
    found, expected = (
        values_in(quantised, read_spec(quantised).quantised),
        load_file(plain / "model.safetensors"),
    )
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("form", ["gptq", "gptq asymmetric", "gptq 8 bits"])
def test_settings_of_an_old_folder_are_in_a_file_of_their_own(
    tmp_path: Path, models: dict[str, Path], form: str
) -> None:
    """Red before: ``setpoint models`` took the folder for one that is not quantised and said yes,
    and the server lacked its matrices."""
    quantised, plain = quantise(models["llama"], tmp_path, form)
    config = json.loads((quantised / "config.json").read_text())
    section = config.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(config))
    own = quantised / "quantize_config.json"
    own.write_text(json.dumps({**section, "damp_percent": 0.01, "model_name_or_path": None}))
    spec = read_spec(quantised)
    found, expected = values_in(quantised, spec.quantised), load_file(plain / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert kinds_in(runner_of(quantised)) == {FORMATS[form][2]}
    own.write_text(json.dumps({**section, "bits": 3}))
    with pytest.raises(
        CheckpointError, match=r"'bits' .*quantize_config.json|quantize_config.*bits"
    ):
        read_spec(quantised)


@pytest.mark.parametrize("form", EXACT)
def test_blocks_are_kept_and_give_the_bits_of_bfloat16(
    tmp_path: Path, models: dict[str, Path], form: str
) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, form)
    kept, theirs = runner_of(quantised), runner_of(plain)
    for num_tokens in (1, 33):
        logits = logits_of(kept, num_tokens)
        assert logits.isfinite().all()
        assert torch.equal(logits, logits_of(theirs, num_tokens))
    kind = FORMATS[form][2]
    assert kinds_in(kept) == ({kind} if kind else set())
    if not kind:
        assert "14 are dequantized to bfloat16 when loaded" in kept.report.weights
    assert not kept.why_eager


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16 asymmetric", "fp8 blocks", "nf4"])
def test_fused_matrices_are_cut(tmp_path: Path, models: dict[str, Path], form: str) -> None:
    quantised, plain = quantise(models["fused"], tmp_path, form)
    kept, kind = runner_of(quantised), FORMATS[form][2]
    assert torch.equal(logits_of(kept, 17), logits_of(runner_of(plain), 17))
    assert kinds_in(kept) == ({kind} if kind else set())


@pytest.mark.parametrize("form", ROUNDING)
def test_activations_are_rounded_where_the_folder_asks(
    tmp_path: Path, models: dict[str, Path], form: str
) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, form)
    kept = runner_of(quantised)
    assert kinds_in(kept) == {"W8A8"}
    assert 0 < distance(logits_of(kept, 17), logits_of(runner_of(plain), 17)) < 0.2
    assert not kept.why_eager
    exact = runner_of(quantised, quantization="unquant")
    assert "14 meet activations that are not rounded to 8 bits" in exact.report.weights


@pytest.mark.parametrize("form", [*OF_MIXTURES, "w4a16", "w8a8 static"])
def test_other_types_convert_the_codes(tmp_path: Path, models: dict[str, Path], form: str) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, form)
    for fields in ({"dtype": "float32"}, {"quantization": "unquant"}):
        assert torch.equal(
            logits_of(runner_of(quantised, **fields), 9), logits_of(runner_of(plain, **fields), 9)
        )


@pytest.mark.parametrize("form", OF_MIXTURES)
def test_experts_are_kept_one_by_one(tmp_path: Path, models: dict[str, Path], form: str) -> None:
    quantised, plain = quantise(models["mixture"], tmp_path, form)
    kept, theirs = runner_of(quantised), runner_of(plain)
    kind = FORMATS[form][2]
    assert kinds_in(kept) == ({kind} if kind else set())
    logits = logits_of(kept, 17)
    if form in ROUNDING:
        assert distance(logits, logits_of(theirs, 17)) < 0.1
    else:
        assert torch.equal(logits, logits_of(theirs, 17))


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "w4a16", "fp8 blocks", "nf4 nested"])
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_answers_are_those_of_transformers_with_the_dequantised_model(
    tmp_path: Path, models: dict[str, Path], model: str, form: str
) -> None:
    quantised, plain = quantise(models[model], tmp_path, form)
    found = measure(quantised, context_len=64, prompt_lengths=(5, 33), num_new=6, judged_by=plain)
    assert found.wrong == 0
    assert found.relative < TOLERANCES["float32"]
    assert found.num_tokens == 24


def test_the_transformers_model_reads_the_codes(tmp_path: Path, models: dict[str, Path]) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, "awq")
    theirs = runner_of(quantised, dtype="float32", model_impl="transformers")
    ours = logits_of(runner_of(plain, dtype="float32"), 9)
    assert torch.allclose(logits_of(theirs, 9), ours, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_memory_is_planned_by_the_headers(
    tmp_path: Path, models: dict[str, Path], form: str
) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, form)
    spec = read_spec(quantised)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec  # as in a job
    assert spec.num_parameters == read_spec(plain).num_parameters
    kind = FORMATS[form][2]
    assert (spec.blocks.kinds if spec.blocks else ()) == ((kind,) if kind else ())
    matrices = [each for each in load_file(plain / "model.safetensors") if is_quantised(each)]
    assert len(spec.quantised) == len(matrices)
    planned = weight_bytes(spec, 2, blocks=True, head_copied=True)
    assert runner_of(quantised).report.weight_bytes == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16", "fp8 blocks", "llm.int8", "nf4"])
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_memory_is_planned_before_the_weights_are_here(
    tmp_path: Path, models: dict[str, Path], model: str, form: str
) -> None:
    quantised, _ = quantise(models[model], tmp_path, form)
    whole = weight_bytes(read_spec(quantised), 2, blocks=True)
    (quantised / "model.safetensors").unlink()
    spec = read_spec(quantised)
    assert not spec.quantised
    assert weight_bytes(spec, 2, blocks=True) == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("form", ["awq", "gptq desc_act", "w8a8 static", "fp8 tensor"])
@pytest.mark.parametrize("model", ["llama", "mixture"])
def test_ranks_divide_the_outputs(
    tmp_path: Path, models: dict[str, Path], model: str, form: str
) -> None:
    quantised, _ = quantise(models[model], tmp_path, form)
    config = EngineConfig(
        str(quantised),
        read_spec(quantised),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=4,
        num_threads=1,
    )

    def outcome(size: int) -> tuple[Any, list[int]]:
        prompts = {0: list(range(3, 40)), 1: [7], 2: list(range(9, 20))}
        with ranks(config, size, num_rows=256, max_slots=8, context_len=128) as executor:
            groups = len(executor.executor.runner.pool.layout.groups)
            found = Driver(executor, 4, 32, groups).generate(prompts, 8, chunk=1 << 30)
            return found, executor.checksums

    assert outcome(2) == outcome(1)


def test_a_gate_and_an_up_of_different_kinds_share_one_that_holds_both(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    quantised, _ = quantise(models["llama"], tmp_path, "w4a16")
    file = quantised / "model.safetensors"
    tensors = load_file(file)
    scale = tensors["model.layers.0.mlp.up_proj.weight_scale"]
    scale[3, 1] = 2.0**-30  # which fp16 cannot hold
    save_file(tensors, file, {"format": "pt"})
    kept = runner_of(quantised)
    assert kinds_in(kept) == {"Q4_0", "INT8Z"}
    assert torch.equal(
        logits_of(kept, 9), logits_of(runner_of(quantised, quantization="unquant"), 9)
    )


def test_a_folder_may_leave_modules_as_they_are(tmp_path: Path, models: dict[str, Path]) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, "w4a16")
    file, config = (
        quantised / "model.safetensors",
        json.loads((quantised / "config.json").read_text()),
    )
    path = "model.layers.1.self_attn.k_proj"
    tensors = {
        name: each for name, each in load_file(file).items() if not name.startswith(f"{path}.")
    }
    tensors[f"{path}.weight"] = load_file(plain / "model.safetensors")[f"{path}.weight"]
    save_file(tensors, file, {"format": "pt"})
    config["quantization_config"]["ignore"] += [path, "re:.*lm_head"]
    (quantised / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits_of(runner_of(quantised), 9), logits_of(runner_of(plain), 9))
    config["quantization_config"]["ignore"] += ["re:.*layers.0.mlp.*"]
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.*belongs to a module that the config"):
        read_spec(quantised)


def test_biases_of_zeros_are_not_used(tmp_path: Path, models: dict[str, Path]) -> None:
    quantised, plain = quantise(models["llama"], tmp_path, "gptq")
    file, layer = quantised / "model.safetensors", "model.layers.0.self_attn"
    tensors = load_file(file)
    tensors |= {f"{layer}.o_proj.bias": torch.zeros(64)}
    save_file(tensors, file, {"format": "pt"})
    kept = runner_of(quantised)
    assert torch.equal(logits_of(kept, 9), logits_of(runner_of(plain), 9))
    tensors[f"{layer}.o_proj.bias"][3] = 1
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj.bias' in .* does not belong to this"):
        runner_of(quantised)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_multimodal_folder(
    tmp_path: Path, models: dict[str, Path], prefix: str
) -> None:
    quantised, plain = quantise(models["gemma"], tmp_path, "awq")
    file, path = quantised / "model.safetensors", quantised / "config.json"
    inner = json.loads(path.read_text())
    tensors = {
        name.replace("model.", prefix, 1): each for name, each in load_file(file).items()
    } | {"vision_tower.x.weight": torch.zeros(2, 2)}
    save_file(tensors, file, {"format": "pt"})
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "vision_config": {},
        "quantization_config": inner.pop("quantization_config"),
        "text_config": inner,
    }
    path.write_text(json.dumps(outer))
    kept = runner_of(quantised)
    assert torch.equal(logits_of(kept, 9), logits_of(runner_of(plain), 9))
    assert kinds_in(kept) == {"INT4Z"}


def test_another_matrix_shape_than_the_config_asks_for(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    quantised, _ = quantise(models["llama"], tmp_path, "awq")
    spec = read_spec(quantised)
    wrong = replace(spec, intermediate_size=256, config=spec.config | {"intermediate_size": 256})
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' in .* has shape .*the config"):
        build_runner(EngineConfig(str(quantised), wrong))


@pytest.mark.parametrize(("form", "rounds"), [("gptq", True), ("gptq asymmetric", False)])
def test_blocks_int8_says_whether_it_rounds_anything(
    tmp_path: Path, models: dict[str, Path], form: str, rounds: bool
) -> None:
    """A folder that says it is symmetric, whether it is or not; only the engine reads its zeros."""
    quantised, _ = quantise(models["llama"], tmp_path, form)
    path = quantised / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["sym"] = True
    path.write_text(json.dumps(config))
    spec = read_spec(quantised)
    assert spec.blocks is not None
    assert spec.blocks.kinds == ("Q4_0",)
    ours, exact = runner_of(quantised, quantization="blocks_int8"), runner_of(quantised)
    expected = "codes, multiplied by" if rounds else "codes, none of them multiplied by"
    assert expected in ours.report.weights
    for num_tokens in (9, 40):  # few and many rows
        found = distance(logits_of(ours, num_tokens), logits_of(exact, num_tokens))
        assert 0 < found < 0.1 if rounds else found == 0
