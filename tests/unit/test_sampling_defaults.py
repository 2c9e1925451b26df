"""Where the sampling of a request that says nothing comes from."""

from __future__ import annotations

from pathlib import Path

from setpoint.checkpoint.source import DEFAULT_SAMPLING, ModelSource
from setpoint.launch.configuration import sampling_defaults


def source(folder: Path, *, is_default: bool) -> ModelSource:
    return ModelSource(folder, "a/model", "test", is_default)


def test_the_default_model_gets_what_its_card_says(tmp_path: Path) -> None:
    assert sampling_defaults("model", source(tmp_path, is_default=True)) == DEFAULT_SAMPLING
    assert sampling_defaults("model", source(tmp_path, is_default=False)) == {}
    assert sampling_defaults("openai", source(tmp_path, is_default=True)) == {}


def test_a_generation_config_wins(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 2}'
    )
    assert sampling_defaults("model", source(tmp_path, is_default=False)) == {
        "temperature": 0.6,
        "top_k": 20,
    }
    assert sampling_defaults("model", source(tmp_path, is_default=True)) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
    }
