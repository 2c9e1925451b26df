"""What a decode step launches on a GPU, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from setpoint_testing.absent_gpu import without_interpreter

COPY = "copy_"
"""The copy of all that the host knows of a step."""
EXPERTS = [
    "route_tokens",
    "place_pairs",
    "sort_pairs",
    "multiply_tiles",
    "gate_rows",
    "sort_pairs",
    "multiply_tiles",
]
LAYER = [
    "rms_norm_rows",  # the sum with the residual too
    "linear",
    "rotate_and_store",
    "attention_pieces",
    "attention_merge",
    "linear",
    "rms_norm_rows",
    "linear",
    "gate_rows",
    "linear",
]

CHOICE, CUT_CHOICE = (
    ["weigh_tiles", "choose_tokens"],
    ["weigh_tiles", "collect_candidates", "choose_tokens"],
)
SAMPLING = {
    "greedy": ["place_chosen"],
    "greedy, masked": ["to", "edit_rows", *CHOICE],
    "whole": CHOICE,
    "cut": CUT_CHOICE,
    "edited": ["edit_rows", *CUT_CHOICE],
    "edited, masked": ["to", "edit_rows", *CUT_CHOICE],
}
"""Only masks are copied to the device."""


def launches_of(
    tmp_path: Path, family: str, quantization: str = "unquant", *how: str
) -> tuple[dict[str, list[str]], int]:
    module, model = "setpoint_testing.counted_launches", str(tmp_path / "model")
    return json.loads(
        without_interpreter([module, model, family, quantization, *how], tmp_path / "kernels")
    )


def test_a_decode_step_launches_few_kernels(tmp_path: Path) -> None:
    launches, num_layers = launches_of(tmp_path, "llama")
    before = [COPY, "place_step", "attention_plan", "take_rows"]
    after = ["rms_norm_rows", "take_rows", "linear", "best_of_chunks", "best_of_rows"]
    assert launches.pop("forward") == before + LAYER * num_layers + after
    assert launches == SAMPLING


def test_torch_multiplies_nothing_whose_bits_must_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Nor is a row of attention cut, so there is nothing to merge."""
    launches, num_layers = launches_of(tmp_path, "llama", "unquant", "invariant")
    layer = [
        each.replace("linear", "multiply_tiles") for each in LAYER if each != "attention_merge"
    ]
    before = [COPY, "place_step", "attention_plan", "take_rows"]
    after = ["rms_norm_rows", "take_rows", "multiply_tiles", "best_of_chunks", "best_of_rows"]
    assert launches.pop("forward") == before + layer * num_layers + after
    assert launches == SAMPLING


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "quantization"),
    [("deepseek_v2", "unquant"), ("llama", "fp8"), ("gpt_oss", "unquant")],
)
def test_nor_in_any_other_model(family: str, quantization: str, tmp_path: Path) -> None:
    launches, _ = launches_of(tmp_path, family, quantization, "invariant")
    assert not {"linear", "bmm", "mm", "addmm", "_scaled_mm"} & set(launches["forward"])
    assert launches["forward"].count("multiply_tiles") > 0


@pytest.mark.full
def test_experts_and_heads_are_multiplied_together(tmp_path: Path) -> None:
    """The host learns nothing of which experts were chosen; a latent attention has two products of
    heads."""
    launches, num_layers = launches_of(tmp_path, "deepseek_v2")
    text = " ".join(launches["forward"])
    sparse = text.count(" ".join(EXPERTS))
    assert 0 < sparse < num_layers, "the first layer has no experts"
    assert text.count("sort_pairs") == text.count("multiply_tiles") == 2 * sparse
    assert text.count("bmm") == 2 * num_layers


@pytest.mark.full
def test_activations_of_8_bits_are_rounded_once_for_a_product(tmp_path: Path) -> None:
    for quantization, products in (
        ("fp8", {"_scaled_mm", "multiply_tiles"}),
        ("w8a8_int8", {"multiply_tiles"}),
    ):
        launches, num_layers = launches_of(tmp_path / quantization, "llama", quantization)
        forward = launches["forward"]
        assert "linear" not in forward
        assert forward.count("quantise") == 4 * num_layers + 1, "and the head"
        after = {forward[i + 1] for i, each in enumerate(forward) if each == "quantise"}
        assert after <= products
