"""Finds the token ids that end a turn in a folder's tokenizer files. In many checkpoints only these
files name them.

This module reads only JSON files. It does not read the model's config: ``spec`` adds the ids that
the config names.
"""

from __future__ import annotations

from pathlib import Path

from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object

TURN_ENDS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Tokens that end a turn in every tokenizer that has them as added tokens, although checkpoints do
not name them. The list is SGLang's."""


def tokenizer_end_ids(folder: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's ``eos_token`` and the ids of TURN_ENDS; empty for a folder
    without a tokenizer.

    Raises CheckpointError if a tokenizer file is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ()
    tokenizer = read_object(path)
    config_path = folder / "tokenizer_config.json"
    config = read_object(config_path) if config_path.is_file() else {}
    try:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        ids = [added[text] for text in TURN_ENDS if text in added]
        named = config.get("eos_token")
        if isinstance(named, dict):
            named = named.get("content")
        eos = added.get(named)
        if eos is None and named is not None:
            vocabulary = tokenizer["model"]["vocab"]
            if isinstance(vocabulary, list):  # of a unigram model: the id is the place
                vocabulary = {text: place for place, (text, _) in enumerate(vocabulary)}
            eos = vocabulary.get(named)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} cannot be read as a tokenizer; fetch it again, or pass --tokenizer-path."
        ) from None
    return tuple(ids if eos is None else dict.fromkeys([eos, *ids]))
