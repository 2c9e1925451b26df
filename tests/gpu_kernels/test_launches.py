"""What a decode step launches on a GPU, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

from setpoint_testing.absent_gpu import without_interpreter

COPY = "copy_"
"""The copy of all that the host knows of a step."""
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


def test_a_decode_step_launches_few_kernels(tmp_path: Path) -> None:
    command = ["setpoint_testing.counted_launches", str(tmp_path / "model"), "llama"]
    launches, num_layers = json.loads(without_interpreter(command, tmp_path / "kernels"))
    before = [COPY, "place_step", "attention_plan", "take_rows"]
    after = ["rms_norm_rows", "take_rows", "linear", "best_of_chunks", "best_of_rows"]
    assert launches.pop("forward") == before + LAYER * num_layers + after
    assert launches == SAMPLING
