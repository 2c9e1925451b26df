"""Folders that transformers itself saves: their config.json names keys and values as its version
likes, and they are read as the released checkpoint that was loaded. ``make full`` runs this file
and the goldens with the newest transformers, too (scripts/test-newest-transformers)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from setpoint.checkpoint.folder.config_names import EQUAL_NAMES, NONE_VALUES
from setpoint.checkpoint.folder.families import GATED
from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.core.model import ModelSpec
from setpoint.engine.models.model_registry import build_model
from setpoint_testing.against_transformers import TOLERANCES, measure, write_tiny
from setpoint_testing.goldens import GOLDENS, Golden
from setpoint_testing.library_goldens import THROUGH_TRANSFORMERS

FIRST = {golden.config["architectures"][0]: golden for golden in reversed(GOLDENS)}
"""A golden of each architecture, for the quick tests."""


ARCHITECTURES = {golden.config["model_type"]: name for name, golden in FIRST.items()}
CLASS_OF = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have -> the one whose configuration class they use."""


def saved(folder: Path, to: Path) -> Path:
    """What transformers saves of the model in ``folder`` after it has loaded it."""
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(to)
    return to


def without_config(spec: ModelSpec) -> ModelSpec:
    """For comparisons: everything but the config itself."""
    return replace(spec, config={})


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(each, marks=() if each in FIRST.values() else pytest.mark.full)
        for each in (*GOLDENS, *THROUGH_TRANSFORMERS)
    ],
    ids=lambda golden: golden.name,
)
def test_a_saved_folder_answers_as_transformers_does(golden: Golden, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "released", golden.config)
    again = saved(folder, tmp_path / "saved")
    assert without_config(read_spec(again)) == without_config(read_spec(folder))
    found = measure(
        again,
        context_len=golden.context_len,
        prompt_lengths=golden.prompt_lengths[:2],
        num_new=4,
        model_impl=golden.model_impl,
    )
    assert found.implementation == golden.model_impl
    assert found.relative < TOLERANCES["float32"]
    assert (found.wrong, found.near_ties) == (0, 0)


@pytest.mark.parametrize("model_type", sorted(GATED - {"kimi_k2"}))
def test_a_config_of_defaults_means_what_transformers_makes_of_it(
    model_type: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[model_type](architectures=[ARCHITECTURES[model_type]])
    if model_type == "deepseek_v2":
        config.num_experts_per_tok = 6  # its default is null, which no model can be made of
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    kept = model.state_dict()
    buffers = sum(each.numel() for name, each in model.named_buffers() if name in kept)
    assert read_spec(tmp_path).num_parameters == model.num_parameters() + buffers


def test_the_equal_names_are_those_of_transformers() -> None:
    assert EQUAL_NAMES.keys() <= GATED
    for model_type in GATED:
        theirs = CONFIG_MAPPING[CLASS_OF.get(model_type, model_type)].attribute_map
        ours = EQUAL_NAMES.get(model_type, {})
        assert {*map(frozenset, ours.items())} == {*map(frozenset, theirs.items())}, model_type


@pytest.mark.parametrize("golden", FIRST.values(), ids=lambda golden: golden.name)
def test_each_of_two_equal_names_is_read(golden: Golden, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, golden.config)
    path, spec = folder / "config.json", read_spec(folder)
    for other, usual in EQUAL_NAMES.get(spec.model_type, {}).items():
        config = golden.config.copy()
        if (value := config.pop(usual, None)) is None:
            continue  # a key that Setpoint does not read
        path.write_text(json.dumps(config | {other: value}))
        assert without_config(read_spec(folder)) == without_config(spec)
        path.write_text(json.dumps(config | {other: value, usual: value}))
        assert without_config(read_spec(folder)) == without_config(spec)
        path.write_text(json.dumps(config | {other: value, usual: value + 1}))
        with pytest.raises(CheckpointError, match=f"{other}.*{usual}.*both"):
            read_spec(folder)


@pytest.mark.parametrize("golden", FIRST.values(), ids=lambda golden: golden.name)
def test_a_value_that_means_none_is_none(golden: Golden, tmp_path: Path) -> None:
    def outcome(key: str, value: Any) -> Any:
        config = golden.config | {key: value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            return build_model(read_spec(tmp_path)) and without_config(read_spec(tmp_path))
        except CheckpointError as error:
            return str(error)

    for key, values in NONE_VALUES.items():
        for value in (*values, *([False] if 0 in values else [])):
            assert outcome(key, value) == outcome(key, None), (key, value)


@pytest.mark.full
def test_without_an_index_nothing_is_tested_as_the_newest(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.symlink_to(sys.prefix)
    script = Path(__file__).parents[2] / "scripts/test-newest-transformers"
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [script, venv],
        env=ours | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "newest transformers cannot be fetched" in done.stdout
    assert "The goldens" not in done.stdout
