"""A tiny random Llama model: prompt logprobs against transformers, bf16 near fp32 (``test_goldens``
has logits and ids)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from setpoint.checkpoint.spec import read_spec
from setpoint.core.request import LogprobOptions, RequestOptions
from setpoint.engine.executor.build_runner import EngineConfig, build_runner
from setpoint.engine.executor.inproc import InprocExecutor
from setpoint.engine.runner.model_runner import ModelRunner
from setpoint_testing.plans import Driver
from setpoint_testing.tiny_models import write_tiny_llama

PAGE, PAGES = 4, 32
PROMPT = np.random.default_rng(5).integers(3, 131, 70).tolist()


def reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def runner_of(
    folder: Path, device: str, dtype: str = "float32", attention: str = "torch_ref"
) -> ModelRunner:
    config = EngineConfig(
        str(folder),
        read_spec(folder),
        dtype=dtype,
        kv_dtype=dtype,
        page_size=PAGE,
        attention_backend=attention,
        num_threads=1,
        device=device,
    )
    runner = build_runner(config)
    runner.allocate(num_pages=4 * PAGES, max_slots=4, context_len=PAGE * PAGES)
    return runner


def test_prompt_logprobs_equal_transformers(tmp_path: Path, device: str) -> None:
    folder = write_tiny_llama(tmp_path)
    with torch.inference_mode():
        wanted = reference(folder)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    driver = Driver(InprocExecutor(runner_of(folder, device)), PAGE, PAGES)
    plan = driver.plan()
    driver.admit(
        plan,
        0,
        PROMPT,
        options=RequestOptions(logprobs=LogprobOptions(top=3, ids=(7, 9))),
        logprob_start=0,
    )
    plan.add_row(0, 0, 0, 30, 0)
    first = driver.run(plan)
    assert not first.output_logprobs
    plan = driver.plan()
    plan.add_row(0, 0, 30, len(PROMPT) - 30, 1)
    second = driver.run(plan)
    for logprobs, begin, end in (
        (first.prompt_logprobs[0], 1, 31),
        (second.prompt_logprobs[0], 31, len(PROMPT)),
    ):
        rows = wanted[begin - 1 : end - 1]
        assert logprobs.ids.tolist() == PROMPT[begin:end]
        np.testing.assert_allclose(
            logprobs.values, rows[torch.arange(end - begin), PROMPT[begin:end]], atol=1e-4
        )
        np.testing.assert_allclose(logprobs.top_values, rows.topk(3).values, atol=1e-4)
        assert logprobs.top_ids.tolist() == rows.topk(3).indices.tolist()
        np.testing.assert_allclose(logprobs.picked, rows[:, [7, 9]], atol=1e-4)
    output = second.output_logprobs[0]
    np.testing.assert_allclose(output.values[0], wanted[-1].max(), atol=1e-4)
    assert output.ids.tolist() == [int(wanted[-1].argmax())] == second.token_ids.tolist()


def test_bfloat16_stays_near_float32(tmp_path: Path, device: str) -> None:
    folder = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    logits = []
    for dtype in ("float32", "bfloat16"):
        runner = runner_of(folder, device, dtype, "auto")
        driver = Driver(InprocExecutor(runner), PAGE, PAGES)
        plan = driver.plan()
        driver.admit(plan, 0, PROMPT)
        plan.add_row(0, 0, 0, len(PROMPT), 1)
        logits.append(runner.forward(plan.build()).logits.clone())
    assert logits[1].dtype == torch.bfloat16
    assert (logits[0] - logits[1]).abs().max() < 0.1 * logits[0].std()
