"""What is predicted for a GPU: the bytes are those of the real modules, the floors those that were computed
by hand, and more work never takes less time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from gpu.models import CONFIGS, GPT_OSS, LLAMA_8B, QWEN3_0_6B, V2_LITE, write_model
from gpu.roofline import (
    BF16,
    CHIPS,
    DECODE,
    FP8,
    MXFP4,
    PREFILL,
    Form,
    Step,
    floor_s,
    forms,
    kernels,
    offline_rate,
    spec_of,
    step_s,
    table,
)

from setpoint.engine.models.model_registry import build_model

COPY, PRODUCT = 4.3e12, 788e12
H200 = next(chip for chip in CHIPS if chip.name == "H200")
DOCS = Path(__file__).parents[3] / "docs/gpu.md"


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_weights_of_a_step_are_those_of_the_model(name: str, tiny: bool) -> None:
    """All matrices, if a step uses all experts; the embedding is read by rows, or is the head."""
    spec = spec_of(name, tiny=tiny)
    numbers = Form("numbers", 1, 1, 0)
    every = kernels(spec, numbers, Step(1 << 20, 1))
    read = sum(each.count * each.streamed for each in every if each.flops)
    matrices = {
        name: parameter.numel()
        for name, parameter in build_model(spec).named_parameters()
        if parameter.dim() > 1
    }
    if not spec.tie_embeddings:
        del matrices["model.embed_tokens.weight"]
    exact = sum(n for name, n in matrices.items() if "kv_b_proj" in name or ".gate." in name)
    exact += sum(n for name, n in matrices.items() if "router" in name)
    assert read == sum(matrices.values()) + exact  # which are not rounded, so have two bytes


def floor_ms(name: str, form: Form, step: Step) -> float:
    return floor_s(kernels(spec_of(name), form, step), COPY) * 1e3


@pytest.mark.parametrize(
    ("name", "form", "rows", "length", "expected_ms"),
    [
        (LLAMA_8B, BF16, 1, 1024, 3.52),
        (LLAMA_8B, BF16, 64, 1536, 6.5),
        (LLAMA_8B, BF16, 256, 1536, 15.5),
        (GPT_OSS, MXFP4, 1, 1024, 0.86),
        (GPT_OSS, MXFP4, 256, 1536, 5.4),
        (V2_LITE, BF16, 256, 1536, 10.0),
        (V2_LITE, BF16, 1, 1024, 1.15),
    ],
)
def test_floors_of_decode_steps(
    name: str, form: Form, rows: int, length: int, expected_ms: float
) -> None:
    assert floor_ms(name, form, Step(rows, length)) == pytest.approx(expected_ms, rel=0.03)


def test_a_prefill_of_8k_is_141_tflop_with_the_logits_of_every_token() -> None:
    spec = spec_of(LLAMA_8B)
    for sampled, tflop in ((8192, 141), (0, 132)):
        step = Step(1, 8192, 8192, sampled=sampled)
        flops = sum(each.count * each.flops for each in kernels(spec, BF16, step))
        assert flops / 1e12 == pytest.approx(tflop, rel=0.01)
        assert flops / PRODUCT * 1e3 < step_s(spec, BF16, step, H200) * 1e3


def test_a_layer_launches_what_a_layer_launches() -> None:
    """Ten kernels, four of them products: what ``tests/gpu_kernels/test_launches.py`` has."""
    spec = spec_of(LLAMA_8B)
    count = Counter()
    for each in kernels(spec, BF16, Step(64, 1536)):
        count[each.name] += each.count
    in_layers = {name: n for name, n in count.items() if n >= spec.num_layers}
    assert sum(in_layers.values()) == 10 * spec.num_layers + 1
    assert count["qkv"] == count["o"] == count["gate and up"] == count["down"] == spec.num_layers
    rounded = kernels(spec, FP8, Step(64, 1536))
    assert sum(each.count for each in rounded if each.name == "rounding") == 4 * 32 + 1


def test_windows_bound_what_is_read_and_multiplied() -> None:
    step = Step(2, 1000, 10)
    assert step.positions(None) == 2000
    assert step.positions(128) == 2 * 137  # the first of the ten tokens sees 128 positions
    assert step.pairs(None) == 2 * sum(range(991, 1001))
    assert step.pairs(128) == 2 * 10 * 128
    assert Step(1, 5, 5).pairs(3) == 1 + 2 + 3 + 3 + 3
    spec = spec_of(GPT_OSS)
    sizes = [e.streamed for e in kernels(spec, BF16, Step(1, 1536)) if e.name == "attention"]
    assert sizes == [128 * 2048, 1536 * 2048]


@pytest.mark.parametrize("name", CONFIGS)
def test_more_work_never_takes_less_time(name: str) -> None:
    spec = spec_of(name)
    for chip in CHIPS:
        for form in forms(name):
            times = (
                [step_s(spec, form, step, chip) for step in (*DECODE, PREFILL)]
                if chip.rate(form.product)
                else []
            )
            assert times == sorted(times)
    faster = [step_s(spec, BF16, DECODE[2], chip) for chip in CHIPS]
    assert faster[-1] == min(faster)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_chip_that_is_better_on_paper_is_predicted_faster(name: str) -> None:
    """An H200 is an H100 with a faster memory; rates of two kinds would say otherwise."""
    spec = spec_of(name)
    for form in (BF16, FP8):
        for step in (*DECODE, PREFILL):
            hopper = [step_s(spec, form, step, chip) for chip in CHIPS[1:]]
            assert hopper == sorted(hopper, reverse=True)


def test_what_was_reached_on_an_h200_is_what_is_predicted_of_it() -> None:
    assert H200.copies == pytest.approx(COPY)
    assert H200.rate("bf16") == pytest.approx(PRODUCT)


def test_a_bench_takes_its_prompts_and_its_steps() -> None:
    spec = spec_of(QWEN3_0_6B)
    one = offline_rate(spec, BF16, H200, [(1000, 1000)])
    assert one == pytest.approx(1 / step_s(spec, BF16, Step(1, 1500), H200), rel=0.02)
    many = offline_rate(spec, BF16, H200, [(1000, 1000)] * 256)
    decode = 256 / step_s(spec, BF16, Step(256, 1500), H200)
    assert 0.75 * decode < many < decode


def test_the_table_of_the_docs_is_what_is_predicted() -> None:
    assert "\n".join(table()) in DOCS.read_text()


def test_a_written_model_has_no_weights(tmp_path: Path) -> None:
    assert [path.name for path in write_model(tmp_path, LLAMA_8B).iterdir()] == ["config.json"]
