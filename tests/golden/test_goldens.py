"""Every model of the golden table against transformers: logits, greedy ids through chunks and a
warm cache, parameters, template."""

from __future__ import annotations

from pathlib import Path

import pytest

from setpoint_testing.against_transformers import (
    TOLERANCES,
    measure,
    template_differences,
    write_tiny,
)
from setpoint_testing.chat_templates import TEMPLATES
from setpoint_testing.goldens import GOLDENS, Golden
from setpoint_testing.library_goldens import THROUGH_TRANSFORMERS


def check(
    folder: Path,
    golden: Golden,
    device: str,
    *,
    seed: int = 0,
    num_new: int = 8,
    attention: str = "auto",
    dtype: str = "float32",
) -> None:
    write_tiny(folder, golden.config, seed=seed)
    found = measure(
        folder,
        context_len=golden.context_len,
        prompt_lengths=golden.prompt_lengths,
        num_new=num_new,
        attention=attention,
        model_impl=golden.model_impl,
        device=device,
        dtype=dtype,
    )
    assert found.implementation == golden.model_impl
    assert found.relative < TOLERANCES[dtype]
    assert (found.wrong, found.near_ties) == (0, 0)
    assert found.num_tokens == 2 * num_new * len(golden.prompt_lengths)
    assert found.num_cached > sum(golden.prompt_lengths) // 2
    stored, planned, theirs = found.parameters
    assert stored == theirs
    assert planned == theirs or golden.model_impl == "transformers"


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_tiny_model(tmp_path: Path, golden: Golden, device: str) -> None:
    check(tmp_path, golden, device)


@pytest.mark.cases(18)
@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_the_definition_in_float64(tmp_path: Path, golden: Golden, device: str) -> None:
    check(tmp_path, golden, device, dtype="float64")


@pytest.mark.parametrize("golden", THROUGH_TRANSFORMERS, ids=lambda golden: golden.name)
def test_tiny_model_through_transformers(tmp_path: Path, golden: Golden, device: str) -> None:
    check(tmp_path, golden, device)


@pytest.mark.full
@pytest.mark.parametrize("golden", GOLDENS + THROUGH_TRANSFORMERS, ids=lambda golden: golden.name)
@pytest.mark.parametrize("attention", ["auto", "torch_ref"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_tiny_model_at_length(
    tmp_path: Path, golden: Golden, device: str, attention: str, seed: int
) -> None:
    check(tmp_path, golden, device, seed=seed, num_new=36, attention=attention)


@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_template(name: str) -> None:
    assert not template_differences(TEMPLATES[name])
