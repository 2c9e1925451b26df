"""Reads how a model's hidden states become embeddings: from the files of sentence-transformers, or
by a default if there are none.

Works on the JSON files next to the weights: ``modules.json`` lists the steps (transformer, pooling,
normalisation), and ``1_Pooling/config.json`` names the kind of pooling. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_json, read_object
from setpoint.core.model import ModelSpec, Pooling
from setpoint.core.request import PoolingKind

MODULES_NAME = "modules.json"
KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
"""sentence-transformers' name of a kind of pooling -> ours."""
OLD_KEYS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}
"""Key -> kind of pooling. Configs from before sentence-transformers 5.2 have one boolean key per
kind."""


def check_generates(folder: Path, spec: ModelSpec, *, log: Callable[[str], None]) -> None:
    """Raise CheckpointError for a decoder without its head. ``log`` is told of a whole one that its
    authors made for embeddings."""
    if _has_no_head(spec):
        raise CheckpointError(
            f"{folder} is an embedding model ({spec.architecture}), which generates no text; add"
            " --is-embedding to serve its embeddings."
        )
    if (folder / MODULES_NAME).is_file():
        log(
            f"{folder} is an embedding model ({MODULES_NAME}), and what it generates will be of no"
            " use; --is-embedding serves its embeddings."
        )


def is_for_embeddings(folder: Path, spec: ModelSpec) -> bool:
    """Whether a decoder was made for embeddings, according to its files."""
    return _has_no_head(spec) or (folder / MODULES_NAME).is_file()


def _has_no_head(spec: ModelSpec) -> bool:
    return spec.architecture.endswith("Model") and not spec.architecture.endswith("LMHeadModel")


def read_pooling(folder: Path, spec: ModelSpec) -> Pooling:
    """The pooling that ``modules.json`` declares; without that file, the last token's state,
    normalised, which is SGLang's rule for decoder models.

    Raises CheckpointError for a declaration that is not supported.
    """
    lengths = _lengths(spec)
    path = folder / MODULES_NAME
    if not path.is_file():
        return Pooling(
            "last",
            True,
            spec.hidden_size,
            lengths,
            f"no {MODULES_NAME} next to the weights, so this is SGLang's rule for decoder models",
        )
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path} must list the model's steps.")
    paths = {
        str(module.get("type")).rpartition(".")[2]: str(module.get("path", ""))
        for module in modules
    }
    strange = paths.keys() - {"Transformer", "Pooling", "Normalize"}
    if strange or "Pooling" not in paths:
        what = f"the step {min(strange)!r}" if strange else "a model without a pooling step"
        raise CheckpointError(
            f"{path}: {what} is not supported for embeddings; supported: Transformer, Pooling,"
            " Normalize."
        )
    config_path = folder / paths["Pooling"] / "config.json"
    config = read_object(config_path)
    return Pooling(
        _kind(config_path, config),
        "Normalize" in paths,
        spec.hidden_size,
        lengths,
        f"by {MODULES_NAME}",
    )


def _kind(path: Path, config: Mapping[str, Any]) -> PoolingKind:
    named: Any = config.get("pooling_mode")
    if named is None:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        named = OLD_KEYS.get(modes[0], modes[0]) if len(modes) == 1 else ", ".join(modes) or "none"
    if named not in KINDS:
        raise CheckpointError(
            f"{path}: pooling {named!r} is not supported; supported: {', '.join(KINDS)}."
        )
    return KINDS[named]


def _lengths(spec: ModelSpec) -> tuple[int, ...] | None:
    """``Pooling.lengths``, from SGLang's keys ``matryoshka_dimensions`` and ``is_matryoshka`` in
    config.json, which ``--json-model-override-args`` can add."""
    named = spec.config.get("matryoshka_dimensions")
    if named is None:
        return () if spec.config.get("is_matryoshka") is True else None
    if (
        not isinstance(named, list)
        or not named
        or not all(type(size) is int and 0 < size <= spec.hidden_size for size in named)
    ):
        raise CheckpointError(
            f"'matryoshka_dimensions' must list lengths up to {spec.hidden_size}, not {named!r}."
        )
    return tuple(named)
