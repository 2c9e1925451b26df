"""The token ids with which a folder's tokenizer ends a turn. In many checkpoints only the
tokenizer's files name them.

This module reads JSON files only. It does not read the model's config: ``spec`` adds the ids that
the config names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object

TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens that end a turn in every tokenizer that has added them, although checkpoints do not name
them. The list is SGLang's."""


def tokenizer_end_ids(folder: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's ``eos_token`` and the ids of TURN_ENDS; empty for a folder
    without a tokenizer.

    Raises CheckpointError if a tokenizer file is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ()
    tokenizer = read_object(path)
    try:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        ids = [added[text] for text in TURN_ENDS if text in added]
        named = _eos_token(folder)
        eos = added.get(named)
        if eos is None and named is not None:
            eos = _vocabulary(tokenizer).get(named)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer; fetch it again, or pass --tokenizer-path."
        ) from None
    return tuple(ids if eos is None else dict.fromkeys([eos, *ids]))


def _eos_token(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    named = read_object(path).get("eos_token") if path.is_file() else None
    return named.get("content") if isinstance(named, dict) else named


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Text -> id of the vocabulary's own tokens, without the added ones. In a unigram model the id
    is the token's index in the list."""
    vocabulary = tokenizer["model"]["vocab"]
    return (
        {text: place for place, (text, _) in enumerate(vocabulary)}
        if isinstance(vocabulary, list)
        else vocabulary
    )
