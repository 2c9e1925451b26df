"""Scales of a KV cache in fp8: of checkpoints in every spelling and of files. A model whose keys and
values are many times as large, with these scales, has the bits of the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_captured_steps import make_runner, said, same
from test_latent_attention import V2, V3

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError, ConfigError
from setpoint.engine.executor.build_runner import EngineConfig, build_runner, load_model
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.plans import Driver
from setpoint_testing.quantised_folders import FLOATS, LLAMA, quantise
from setpoint_testing.ranks import ranks
from setpoint_testing.runners import distance
from setpoint_testing.tiny_models import write_tiny_llama

K, V = 2.0**16, 2.0**-16
"""Factors of the keys and of the values: beyond the largest number of fp8, and below its least."""
ATTENTION = "model.layers.{}.self_attn."
SPELLINGS: dict[str, dict[str, float]] = {
    "llm-compressor": {"k_scale": K, "v_scale": V},
    "modelopt": {"k_proj.k_scale": K, "v_proj.v_scale": V},
    "output_scale": {"k_proj.output_scale": K, "v_proj.output_scale": V},
    "vllm": {"attn.k_scale": K, "attn.v_scale": V},
    "fused": {"qkv_proj.k_scale": K, "qkv_proj.v_scale": V},
    "an old one besides": {"kv_scale": 3.0, "k_scale": K, "v_scale": V},
}

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def changed(source: Path, to: Path, change: Change, **config: Any) -> Path:
    """A copy of a model with other tensors and more keys in its config."""
    to.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    old = json.loads((source / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(old | config))
    return to


def outsized(tensors: Tensors, k: float = K, v: float = V) -> None:
    """Multiply keys and values, and divide what meets them: no product changes."""
    for layer in range(2):
        path = ATTENTION.format(layer)
        for name, factor in (("q", 1 / k), ("k", k), ("v", v), ("o", 1 / v)):
            tensors[f"{path}{name}_proj.weight"] *= factor


def scales(endings: Mapping[str, object], layers: int = 2) -> Tensors:
    return {
        ATTENTION.format(layer) + ending: torch.as_tensor(value).clone()
        for layer in range(layers)
        for ending, value in endings.items()
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def large(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without scales."""
    return changed(plain, tmp_path_factory.mktemp("large"), outsized)


def with_scales(folder: Path, to: Path, endings: Mapping[str, object], **config: Any) -> Path:
    return changed(folder, to, lambda tensors: tensors.update(scales(endings)), **config)


def runner_of(folder: Path, kv_dtype: str = "fp8_e4m3", **more: Any) -> ModelRunner:
    return make_runner(folder, kv_dtype=kv_dtype, **more)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
def test_scales_give_the_bits_of_keys_and_values_that_fit(
    plain: Path, large: Path, tmp_path: Path, backend: str, dtype: str, kv_dtype: str
) -> None:
    scaled = with_scales(large, tmp_path, SPELLINGS["llm-compressor"])
    expected, found, without = (
        said(runner_of(folder, kv_dtype, dtype=dtype, attention_backend=backend))
        for folder in (plain, scaled, large)
    )
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
    assert distance(without[1][0], expected[1][0]) > 0.5


def test_replayed_steps_have_the_scales(large: Path, tmp_path: Path) -> None:
    scaled = with_scales(large, tmp_path, SPELLINGS["llm-compressor"])
    replayed, eager = (said(runner_of(scaled, capture=capture)) for capture in (True, False))
    assert replayed[0] == eager[0]
    assert same(replayed[1], eager[1])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(plain: Path, large: Path, tmp_path: Path, spelling: str) -> None:
    runner = runner_of(with_scales(large, tmp_path, SPELLINGS[spelling]))
    assert runner.report.cache_scales == "k 65536, v 1.52588e-05 in 2 layers (the checkpoint)"
    assert same(said(runner)[1], said(runner_of(plain))[1])


def test_one_scale_for_both(plain: Path, tmp_path: Path) -> None:
    def double(tensors: Tensors) -> None:
        outsized(tensors, K, K)
        tensors |= scales({"kv_scale": torch.full((1,), K)})

    both = runner_of(changed(plain, tmp_path, double))
    assert same(said(both)[1], said(runner_of(plain))[1])


def test_quantised_folders_have_scales(tmp_path: Path) -> None:
    """One folder has weights in fp8, the other has only a quantised cache."""
    folder = write_tiny(tmp_path / "model", LLAMA)
    quantised, dequantised = quantise(folder, tmp_path, "float-quantized")
    scheme = FLOATS | {"strategy": "tensor", "dynamic": False}
    config = json.loads((quantised / "config.json").read_text())["quantization_config"]
    cached = {"kv_cache_scheme": scheme}
    endings = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor(0.25).bfloat16()}
    one = with_scales(quantised, tmp_path / "a", endings, quantization_config=config | cached)
    none = config | cached | {"config_groups": {}}
    other = with_scales(dequantised, tmp_path / "b", endings, quantization_config=none)
    first, second = (runner_of(each) for each in (one, other))
    assert "k 0.5, v 0.25" in first.report.cache_scales
    assert "FP8 matrices" in first.report.weights
    assert second.report.weights == "bfloat16"
    assert same(said(first)[1], said(second)[1])
    assert runner_of(one, model_impl="transformers", capture=False)
    assert runner_of(other, model_impl="transformers", capture=False)


@pytest.mark.parametrize("config", [V2, V3], ids=["v2", "v3"])
def test_latent_vectors_have_one_scale(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path / "plain", config)
    spec = read_spec(folder)
    latent, heads = spec.latent, spec.num_heads
    assert latent is not None

    def outsize(tensors: Tensors) -> None:
        for layer in range(spec.num_layers):
            path = ATTENTION.format(layer)
            query = f"{path}q_{'b_' if latent.q_rank else ''}proj.weight"
            by_head = tensors[query].view(heads, latent.query_size, -1)
            by_head[:, latent.key_size :] /= K
            tensors[f"{path}kv_a_proj_with_mqa.weight"][latent.rank :] *= K
            tensors[f"{path}kv_a_layernorm.weight"] *= K
            tensors[f"{path}kv_b_proj.weight"] /= K
        tensors |= scales({"attn_mqa.k_scale": K, "attn_mqa.v_scale": 7.0}, spec.num_layers)

    runner = runner_of(changed(folder, tmp_path / "large", outsize))
    assert same(said(runner)[1], said(runner_of(folder))[1])
    assert runner.report.cache_scales.startswith(f"k 65536, v 65536 in {spec.num_layers} layers")
    assert f"v_scale of {spec.num_layers} layers is not used" in runner.report.cache_scales


def test_scales_that_are_not_used_are_named(plain: Path, tmp_path: Path) -> None:
    endings = {"q_scale": 0.5, "prob_output_scale": 0.5}
    about = runner_of(with_scales(plain, tmp_path, endings)).report.cache_scales
    assert about == (
        "all are 1; K and V beyond 448 are cut off; prob_scale of 2 layers is not used:"
        " probabilities are not rounded; q_scale of 2 layers is not used: queries are not rounded"
    )
    wide = runner_of(with_scales(plain, tmp_path, {"k_scale": torch.ones(2)}), "bfloat16")
    assert wide.report.cache_scales == "2 are not used: a cache in bfloat16 needs none"
    assert runner_of(plain, "bfloat16").report.cache_scales == ""


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def another(ending: str, value: object) -> Change:
    name = ATTENTION.format(1) + ending
    return lambda tensors: tensors.update({name: torch.as_tensor(value)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another("k_scale", 0.0), r"'model.layers.1.self_attn.k_scale' in .* is 0; a scale must"),
        (another("v_scale", -0.5), r"v_scale' in .* is -0.5; a scale must be above zero"),
        (another("k_scale", torch.nan), "is nan; a scale must be above zero and finite"),
        (another("k_scale", torch.inf), "is inf; a scale must be above zero and finite"),
        (another("k_scale", torch.ones(2)), r"has shape \[2\]; only one scale for K and one for V"),
        (another("attn.k_scale", 3.0), "is 3; another tensor says 65536|is 65536; .* says 3"),
        (without("model.layers.1.self_attn.k_scale"), "no k_scale of layer 1"),
        (without("model.layers.0.self_attn.v_scale"), "no v_scale of layer 0"),
        (
            lambda tensors: tensors.update({ATTENTION.format(2) + "k_scale": torch.ones(1)}),
            "is of layer 2; the model has 2 layers",
        ),
    ],
)
def test_bad_scales(plain: Path, tmp_path: Path, change: Change, message: str) -> None:
    folder = with_scales(plain, tmp_path, SPELLINGS["llm-compressor"])
    changed(folder, folder, change)
    with pytest.raises(CheckpointError, match=message):
        runner_of(folder)


def test_a_layer_without_scales(plain: Path, tmp_path: Path) -> None:
    folder = changed(plain, tmp_path, lambda tensors: tensors.update(scales({"kv_scale": 2.0}, 1)))
    with pytest.raises(CheckpointError, match="no k_scale of layer 1"):
        runner_of(folder)


@pytest.mark.parametrize(
    "scheme", [{"type": "int"}, {"num_bits": 4}, {"strategy": "channel"}], ids=str
)
def test_scales_of_another_cache(plain: Path, tmp_path: Path, scheme: dict[str, Any]) -> None:
    scheme = FLOATS | {"strategy": "tensor"} | scheme
    section = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    folder = with_scales(plain, tmp_path, {"kv_scale": 2.0}, quantization_config=section)
    with pytest.raises(CheckpointError, match=r"for another cache.*kv_cache_scheme\."):
        runner_of(folder)
    assert runner_of(folder, "bfloat16")


def file_of_scales(to: Path, content: Mapping[str, object]) -> str:
    path = to / "scales.json"
    path.write_text(json.dumps(content))
    return str(path)


def scaling(*of_ranks: Mapping[int, object], **more: object) -> dict[str, object]:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": dict(enumerate(of_ranks))}
    return {"model_type": "llama", "kv_cache": cache | more}


def test_a_file_of_scales_takes_the_place_of_the_checkpoints(plain: Path, tmp_path: Path) -> None:
    def double(tensors: Tensors) -> None:
        outsized(tensors, K, K)
        tensors |= scales({"kv_scale": 1.0})

    path = file_of_scales(tmp_path, scaling({0: K, 1: K}))
    runner = runner_of(changed(plain, tmp_path, double), quantization_param_path=path)
    assert same(said(runner)[1], said(runner_of(plain))[1])
    assert runner.report.cache_scales == f"k 65536, v 65536 in 2 layers ({path})"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must have an object 'kv_cache' in the file"),
        (scaling({0: 1, 1: 2}) | {"model_type": "gemma"}, "for the model type 'gemma', not"),
        (scaling({0: 1, 1: 2}, dtype="int8"), "has scales of a cache in 'int8'"),
        (scaling({0: 1, 1: 2}, {0: 1, 1: 2}), "must have scales of 1 ranks"),
        (scaling({0: 1}), "must have a scale for each of the 2 layers in rank 0"),
        (scaling({0: 1, 2: 1}), "must have a scale for each of the 2 layers in rank 0"),
        (scaling({0: 1, 1: 0}), "has the scale 0 for layer 1"),
        (scaling({0: -1.0, 1: 1}), "has the scale -1.0 for layer 0"),
        (scaling({0: 1e-60, 1: 1}), "has the scale 1e-60 for layer 0"),
        (scaling({0: float("nan"), 1: 1}), "has the scale 'NaN' for layer 0"),
        (scaling({0: True, 1: 1}), "has the scale True for layer 0"),
        (scaling({0: [1.0], 1: 1}), r"has the scale \[1.0\] for layer 0"),
    ],
)
def test_bad_files(
    plain: Path, tmp_path: Path, content: Mapping[str, object], message: str
) -> None:
    path = file_of_scales(tmp_path, content)
    with pytest.raises(ConfigError, match=f"--quantization-param-path .*{message}"):
        runner_of(plain, quantization_param_path=path)


def test_the_code_of_another_library(plain: Path, large: Path, tmp_path: Path) -> None:
    """The trial at its start finds that keys are cut off without scales."""
    scaled = with_scales(large, tmp_path, SPELLINGS["modelopt"])
    assert runner_of(scaled, model_impl="transformers", capture=False)
    with pytest.raises(CheckpointError, match="logits differ from the library's"):
        runner_of(large, model_impl="transformers", capture=False)


def test_all_ranks_have_the_scales(large: Path, tmp_path: Path) -> None:
    scaled = with_scales(large, tmp_path, SPELLINGS["llm-compressor"])
    config = EngineConfig(str(scaled), read_spec(scaled), kv_dtype="fp8_e4m3", page_size=4)

    def outcome(size: int) -> object:
        with ranks(config, size, num_rows=256, max_slots=8, context_len=128) as executor:
            prompts = {0: [3, 5, 8, 13], 1: list(range(9, 60))}
            return Driver(executor, 4, 32, 1).generate(prompts, 8, chunk=1 << 30)

    assert outcome(2) == outcome(1)


def test_other_weights_bring_other_scales(plain: Path, large: Path, tmp_path: Path) -> None:
    scaled = with_scales(large, tmp_path, SPELLINGS["llm-compressor"])
    runner = runner_of(plain)
    config = EngineConfig(
        str(scaled), read_spec(scaled), kv_dtype="fp8_e4m3", page_size=4, num_threads=2
    )
    expected = said(runner)[1]
    runner.replace(load_model(config, runner))
    assert same(said(runner)[1], expected)


def test_weights_that_are_drawn_have_none(plain: Path) -> None:
    config = EngineConfig(str(plain), read_spec(plain), load_format="dummy", kv_dtype="fp8_e5m2")
    assert build_runner(config).report.cache_scales.startswith("all are 1; K and V beyond 57344")
