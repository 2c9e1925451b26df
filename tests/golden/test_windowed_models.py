"""Models with windows and soft caps (Mistral, Gemma) beyond the golden table: bf16, refused
configs, defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.models.model_registry import build_model
from setpoint_testing.against_transformers import measure, write_tiny
from setpoint_testing.goldens import GOLDENS
from setpoint_testing.plans import Driver, allocate_rows

CONTEXT = 128
CONFIGS = {golden.name: golden.config for golden in GOLDENS}
MISTRAL, GEMMA2, GEMMA3 = (
    CONFIGS[name]
    for name in (
        "mistral: 0.1: a window",
        "gemma2: caps, untied",
        "gemma3_text: two local to one global",
    )
)
IDS = np.random.default_rng(0).integers(0, 256, 75).tolist()


def bfloat16_logits(folder: Path, prompts: list[list[int]]) -> torch.Tensor:
    """The logits of each prompt's last position, on the C++ kernels."""
    runner = build_runner(EngineConfig(str(folder), read_spec(folder), page_size=4, num_threads=1))
    assert runner.report.attention == "cpu"
    num_groups = allocate_rows(runner, num_rows=CONTEXT // 4, max_slots=1, context_len=CONTEXT)
    driver = Driver(InprocExecutor(runner), 4, CONTEXT // 4, num_groups)
    logits = []
    for prompt in prompts:
        plan = driver.plan()
        driver.admit(plan, 0, prompt)
        plan.add_row(0, 0, 0, len(prompt), 1)
        logits.append(
            runner.forward(plan.build()).logits[0].clone()
        )  # a replayed step leaves them in its own memory
    return torch.stack(logits)


@pytest.mark.cases(4)
@pytest.mark.parametrize("config", [GEMMA2, GEMMA3], ids=["gemma2", "gemma3"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (5, 1), (3, 1)])
def test_bfloat16_is_no_worse_than_transformers(
    tmp_path: Path, config: dict[str, Any], heads: int, kv_heads: int
) -> None:
    """Heads of 256 and groups that no vector divides: our distance from the fp32 answer beside
    transformers'."""
    sizes = {
        "hidden_size": 16 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
    }
    folder = write_tiny(tmp_path, {**config, **sizes, "query_pre_attn_scalar": 256})
    eager = {"attn_implementation": "eager"}
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager).eval()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    prompts = [IDS[begin : begin + 40] for begin in range(35)]
    with torch.inference_mode():
        exact, theirs = (model(torch.tensor(prompts)).logits[:, -1] for model in models)
    error, their_error = (
        (logits - exact).square().mean().sqrt()
        for logits in (bfloat16_logits(folder, prompts), theirs)
    )
    assert error < 1.2 * their_error


def write_tiny_wrapped(folder: Path, *, tensor_names: str) -> None:
    """A Gemma 3 with an image tower. Its text_config leaves out what the published ones do."""
    left_out = (
        "architectures",
        "torch_dtype",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
    text = {key: value for key, value in GEMMA3.items() if key not in left_out}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "torch_dtype": "float32",
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 4,
        "text_config": text,
        "vision_config": {**vision, "image_size": 8, "patch_size": 4},
    }
    write_tiny(folder, whole)
    if tensor_names == "old":
        tensors = load_file(folder / "model.safetensors")
        renamed = {
            name.replace("model.language_model.", "language_model.model."): tensor
            for name, tensor in tensors.items()
        }
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in renamed.items()},
            folder / "model.safetensors",
        )


@pytest.mark.parametrize("tensor_names", ["new", "old"])
def test_the_language_model_of_a_gemma3_with_an_image_tower(
    tmp_path: Path, tensor_names: str
) -> None:
    write_tiny_wrapped(tmp_path, tensor_names=tensor_names)
    spec = read_spec(tmp_path)
    assert (spec.architecture, spec.wrapper) == (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.context_len, spec.eos_token_ids) == (
        8,
        4,
        131_072,
        (1, 106),
    )
    found = measure(tmp_path, context_len=CONTEXT, prompt_lengths=(40, 90), num_new=8)
    assert found.max_error < 1e-4 * found.spread
    assert (found.wrong, found.near_ties) == (0, 0)
    stored, planned, theirs = found.parameters
    assert stored == planned < theirs


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            GEMMA3,
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "'rope_parameters' .* must have sections full_attention",
        ),
        (GEMMA3, {"rope_parameters": {"full_attention": 5}}, "must have sections full_attention"),
        (GEMMA3, {"sliding_window": None}, "'sliding_window' is missing; local layers need one"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "'layer_types' must name 4 layers"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' = 50.0"),
        (
            GEMMA2,
            {"attn_logit_softcapping": -1},
            "'attn_logit_softcapping' must be a number above zero, not -1",
        ),
        (GEMMA2, {"use_bidirectional_attention": True}, "'use_bidirectional_attention' = True"),
        (
            GEMMA2,
            {"hidden_activation": "relu"},
            "'hidden_activation' = 'relu' .* gelu_pytorch_tanh",
        ),
        (MISTRAL, {"sliding_window": -2}, "'sliding_window' must be a positive integer"),
        (MISTRAL, {"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types'"),
    ],
)
def test_configs_that_are_refused(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=message):
        build_model(read_spec(tmp_path))


def test_what_configs_leave_out_is_as_in_transformers(tmp_path: Path) -> None:
    """Keys that the released Gemma configs do not have."""
    left_out = (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "sliding_window",
        "hidden_activation",
    )
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in GEMMA2.items() if key not in left_out})
    )
    model = build_model(read_spec(tmp_path))
    assert model.softcap == 30.0
    variants = [layer.self_attn.attend.variant for layer in model.model.layers]
    assert variants[0] == replace(variants[1], window=4096)
    assert (variants[1].scale, variants[1].softcap, variants[1].window) == (1 / 16, 50.0, None)
