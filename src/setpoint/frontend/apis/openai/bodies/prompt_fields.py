"""Reads the prompts of OpenAI's bodies: a string, several strings, token ids, or several lists of
token ids."""

from __future__ import annotations

from typing import Any

from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.frontend.bodies import InvalidBodyError, as_id_lists
from setpoint.frontend.intake import MAX_SEQUENCES, Cut, Intake


async def read_prompts(
    value: str | list[Any], intake: Intake, *, name: str, cut: Cut | None = None
) -> list[Ids]:
    """The ids of every prompt in ``value``, the field ``name`` of a body. Raises RequestError
    (400)."""
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise RequestError(f"{name} must not be empty.")
    if isinstance(texts[0], str):
        if not all(isinstance(text, str) for text in texts):
            raise InvalidBodyError(f"{name} must hold strings or token ids, not both.")
        if len(texts) > MAX_SEQUENCES:
            raise RequestError(f"One request may ask for at most {MAX_SEQUENCES} sequences.")
        return [await intake.encode(text, cut=cut) for text in texts]
    return [intake.prompt_ids(ids, name=name, cut=cut) for ids in as_id_lists(texts, name)[0]]
