"""Where the sampling of a request that says nothing comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.folder.description import Description
from setpoint.checkpoint.recommended import recommended_sampling
from setpoint.checkpoint.source import DEFAULT_SAMPLING, ModelSource
from setpoint.core.errors import CheckpointError


def recommended(wanted: str, *, is_default: bool, **generation: Any) -> dict[str, float]:
    folder = Path("/m")
    description = Description(
        folder / "config.json", {}, folder / "generation_config.json", generation, (), ()
    )
    source = ModelSource(folder, "a/model", "test", is_default, description)
    return recommended_sampling(source, wanted)


def test_the_default_model_gets_what_its_card_says() -> None:
    assert recommended("model", is_default=True) == DEFAULT_SAMPLING
    assert recommended("model", is_default=False) == {}
    assert recommended("openai", is_default=True) == {}


def test_a_generation_config_wins() -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2}
    assert recommended("model", is_default=False, **given) == {"temperature": 0.6, "top_k": 20}
    assert recommended("model", is_default=True, **given) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }


def test_no_top_k_is_the_whole_vocabulary() -> None:
    assert recommended("model", is_default=False, top_k=0) == {"top_k": -1}


def test_a_value_that_no_request_may_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: .*--sampling-defaults"):
        recommended("model", is_default=False, temperature=-1)
