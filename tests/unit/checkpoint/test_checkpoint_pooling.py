"""What a model folder says about embeddings: sentence-transformers' files, their absence, and what
cannot be followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from setpoint.checkpoint.pooling import read_pooling
from setpoint.checkpoint.spec import read_spec
from setpoint.core.errors import CheckpointError
from setpoint.core.model import Pooling
from setpoint_testing.tiny_models import write_tiny_llama

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."


def pooling_of(folder: Path, modules: Any = None, pooling: Any = None, **config: Any) -> Pooling:
    write_tiny_llama(folder, **config)
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return read_pooling(folder, read_spec(folder))


def steps(*kinds: str, prefix: str = OLD) -> list[dict[str, Any]]:
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    return [
        {"idx": index, "type": prefix + kind, "path": path}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def test_without_a_declaration_it_is_the_last_token_normalised(tmp_path: Path) -> None:
    found = pooling_of(tmp_path)
    assert (found.kind, found.normalize, found.size, found.lengths) == ("last", True, 48, None)
    assert "modules.json" in found.why


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (
            {
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
                "pooling_mode_lasttoken": False,
            },
            "mean",
        ),
        (
            {
                "word_embedding_dimension": 48,
                "pooling_mode_lasttoken": True,
                "include_prompt": True,
            },
            "last",
        ),
        ({"embedding_dimension": 48, "pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_a_declaration_is_followed(
    tmp_path: Path, pooling: Any, kind: str, normalised: bool
) -> None:
    modules = steps(
        "Transformer",
        "Pooling",
        *["Normalize"] * normalised,
        prefix=NEW if "pooling_mode" in pooling else OLD,
    )
    found = pooling_of(tmp_path, modules, pooling)
    assert (found.kind, found.normalize) == (kind, normalised)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (steps("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "'Dense'"),
        (steps("Transformer"), {}, "without a pooling step"),
        ({}, {}, "must list"),
        (steps("Transformer", "Pooling"), [], "JSON object"),
        (steps("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "'weightedmean'"),
        (
            steps("Transformer", "Pooling"),
            {"pooling_mode_cls_token": True},
            "pooling_mode_cls_token",
        ),
        (
            steps("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "pooling_mode_max_tokens",
        ),
        (steps("Transformer", "Pooling"), {}, "'none'"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    tmp_path: Path, modules: Any, pooling: Any, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        pooling_of(tmp_path, modules, pooling)


def test_lengths_of_a_matryoshka_model(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, is_matryoshka=True).lengths == ()
    assert pooling_of(tmp_path, matryoshka_dimensions=[16, 32]).lengths == (16, 32)
    with pytest.raises(CheckpointError, match="up to 48"):
        pooling_of(tmp_path, matryoshka_dimensions=[64])
