"""The fallback beyond its golden models: what it refuses and in which words, what its trial finds,
where it stays out of the way."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.attention.attention_backend import AttentionVariant
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.models import library_model
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.against_transformers import write_tiny
from setpoint_testing.harness import Harness
from setpoint_testing.library_goldens import THROUGH_TRANSFORMERS
from setpoint_testing.plans import Driver, allocate_rows
from setpoint_testing.tiny_models import TINY, write_tiny_llama

CONFIGS = {golden.config["model_type"]: golden.config for golden in THROUGH_TRANSFORMERS}
SIZES = {
    key: value
    for key, value in TINY.items()
    if key not in ("architectures", "model_type", "head_dim", "num_key_value_heads")
}


def runner_of(folder: Path, *, dtype: str = "float32", **options: Any) -> ModelRunner:
    options = {"model_impl": "transformers", "page_size": 4, "num_threads": 1, **options}
    return build_runner(
        EngineConfig(str(folder), read_spec(folder), dtype=dtype, kv_dtype=dtype, **options)
    )


def dummy_runner(folder: Path, config: dict[str, Any], **options: Any) -> ModelRunner:
    """Random weights whose spread is large enough for attention to matter."""
    (folder / "config.json").write_text(json.dumps({"initializer_range": 0.3, **config}))
    return runner_of(folder, load_format="dummy", **options)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["NoneSuchForCausalLM"], "model_type": "nonesuch"},
            "no model type 'nonesuch', and code of a checkpoint is never run",
        ),
        (
            {
                "architectures": ["MyLlama"],
                "model_type": "llama",
                "auto_map": {"AutoModel": "x.MyLlama"},
            },
            "not the causal language model",
        ),
        (
            {"architectures": ["BertLMHeadModel"], "model_type": "bert"},
            "asks for tokens that come later",
        ),
        (
            {"architectures": ["RobertaForCausalLM"], "model_type": "roberta", "is_decoder": True},
            "its logits differ from the library's",
        ),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "layer_types": ["full_attention"] * 2,
                "num_key_value_heads": 2,
            },
            "asks for s_aux",
        ),
        (
            {
                "architectures": ["Llama4ForCausalLM"],
                "model_type": "llama4_text",
                "layer_types": ["chunked_attention"] * 2,
            },
            "chunked_attention",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
        (
            {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"},
            "do not use the attention interface",
        ),
        (
            {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"},
            r"called by layers \[0, 0, 1, 1\]",
        ),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            "longest sequence of a batch",
        ),
        (
            {
                "architectures": ["Olmo2ForCausalLM"],
                "model_type": "olmo2",
                "hidden_act": "nonesuch",
            },
            "KeyError",
        ),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_what_cannot_be_driven_is_refused_at_load_with_the_reason(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(
        CheckpointError,
        match=f"^{config['architectures'][0]} cannot be served through transformers: .*{words}",
    ) as caught:
        dummy_runner(tmp_path, {**SIZES, **config})
    assert "\n" not in str(caught.value)


def test_auto_takes_the_declaration_where_there_is_one(tmp_path: Path) -> None:
    report = runner_of(write_tiny_llama(tmp_path), model_impl="auto").report
    assert report.model_impl == "setpoint"
    assert not any("transformers" in fallback.what for fallback in report.fallbacks)


def test_auto_says_that_it_fell_back_and_setpoint_does_not_fall_back(tmp_path: Path) -> None:
    write_tiny(tmp_path, CONFIGS["olmo2"])
    report = runner_of(tmp_path, model_impl="auto").report
    assert report.model_impl == "transformers"
    assert "no model of its own for Olmo2ForCausalLM" in report.fallbacks[0].why
    with pytest.raises(CheckpointError, match="'Olmo2ForCausalLM' is not supported"):
        runner_of(tmp_path, model_impl="setpoint")


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, CONFIGS["olmo2"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install -e '\.\[transformers\]'"):
        runner_of(tmp_path, model_impl="auto")


def test_an_old_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(
        CheckpointError, match=r"transformers 4.57.1 is too old; `.venv/bin/pip install -U"
    ):
        dummy_runner(tmp_path, CONFIGS["olmo2"])


def test_a_declared_model_says_the_same_through_the_fallback(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    prompts = {
        slot: np.random.default_rng(slot).integers(3, 131, length).tolist()
        for slot, length in enumerate((5, 17, 40))
    }
    said = []
    for model_impl in ("setpoint", "transformers"):
        runner = runner_of(tmp_path, dtype="float64", model_impl=model_impl)
        groups = allocate_rows(runner, num_rows=96, max_slots=3, context_len=128)
        driver = Driver(InprocExecutor(runner), 4, 32, groups)
        said.append(driver.generate(prompts, 24, chunk=11))
    assert said[0] == said[1]


def test_the_trial_finds_a_wrong_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        library_model,
        "AttentionVariant",
        lambda scale, *rest: AttentionVariant(2 * scale, *rest),
    )
    with pytest.raises(CheckpointError, match="its logits differ from the library's by"):
        dummy_runner(tmp_path, {**CONFIGS["olmo2"]})


def test_a_window_that_the_attention_is_not_told_of_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        library_model,
        "AttentionVariant",
        lambda scale, cap, _, *rest: AttentionVariant(scale, cap, None, *rest),
    )
    with pytest.raises(CheckpointError, match="do not pass the window to their attention"):
        dummy_runner(tmp_path, {**CONFIGS["starcoder2"], "sliding_window": 16})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight is missing",
        ),
        (lambda tensors: tensors.update(extra=np.zeros(3, np.float32)), "extra is unknown"),
        (
            lambda tensors: tensors.update({"lm_head.weight": np.zeros((7, 64), np.float32)}),
            "lm_head.weight",
        ),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Any, words: str
) -> None:
    path = write_tiny(tmp_path, CONFIGS["olmo2"]) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=words):
        runner_of(tmp_path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    write_tiny(tmp_path, CONFIGS["olmo2"])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"safetensors"):
        runner_of(tmp_path)


def test_16_bit_weights_run_on_the_kernels_of_the_cpu(tmp_path: Path) -> None:
    write_tiny(tmp_path, CONFIGS["gpt_neox"])
    report = runner_of(tmp_path, dtype="bfloat16").report
    assert (report.attention, report.linear) == ("cpu", "cpu")
    stored = sum(tensor.size for tensor in load_file(tmp_path / "model.safetensors").values())
    assert 2 * stored <= report.weight_bytes < 2.2 * stored, "panels are padded"


def test_embeddings_through_the_fallback(tmp_path: Path) -> None:
    from transformers import StableLmModel

    folder = write_tiny(tmp_path, CONFIGS["stablelm"])
    model = StableLmModel.from_pretrained(folder, dtype=torch.float32).eval()
    runner = runner_of(folder)
    runner.allocate(num_pages=64, max_slots=4, context_len=128)
    harness = Harness(
        executor=InprocExecutor(runner),
        num_pages=64,
        page_size=4,
        vocab_size=runner.spec.vocab_size,
        chunked_prefill_size=8,
    )
    prompt = np.random.default_rng(2).integers(0, 200, 30).tolist()
    harness.submit("last", prompt, pooling="last", max_new_tokens=0)
    harness.submit("mean", prompt, pooling="mean", max_new_tokens=0)
    harness.drain()
    with torch.inference_mode():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0]
    for rid, wanted in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        np.testing.assert_allclose(
            np.frombuffer(harness.outcomes[rid].embedding, "<f4"), wanted, rtol=0, atol=2e-5
        )
