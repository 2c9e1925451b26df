"""Converts the engine's logprob blocks to the JSON shape of ``/generate``."""

from __future__ import annotations

from typing import Any

from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import Ids, LogprobOptions
from setpoint.frontend.text.tokenizer import Tokenizer


class NativeLogprobs:
    """Makes ``[logprob, token_id, text | null]`` for each position, and lists of such entries for
    top and picked tokens (docs/sglang/api.md#generate-answer)."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: makes the texts; if None, they are null."""
        self._tokenizer = tokenizer

    def of_outputs(self, asked: LogprobOptions, block: LogprobBlock) -> dict[str, list[Any]]:
        fields: dict[str, list[Any]] = {
            "output_token_logprobs": [
                self._entry(value, token_id)
                for value, token_id in zip(block.values, block.ids, strict=True)
            ]
        }
        if asked.top:
            fields["output_top_logprobs"] = self._top(block)
        if asked.ids:
            fields["output_token_ids_logprobs"] = self._picked(asked, block)
        return fields

    def of_prompt(
        self, asked: LogprobOptions, prompt: Ids, block: LogprobBlock | None
    ) -> dict[str, Any]:
        """The entries of the prompt's positions from ``asked.start`` to the end; none if it is -1.
        The first entry has no logprob, because no reported token precedes it."""
        start = asked.start
        ids = prompt[start:].tolist() if start >= 0 else []
        num_known = min(len(block.values) if block is not None else 0, max(len(ids) - 1, 0))
        num_unknown = len(ids) - num_known
        unknown: list[Any] = [None] * num_unknown
        values: list[float | None] = list(unknown)
        top, picked = list(unknown), list(unknown)
        if block is not None and num_known:
            values += block.values[-num_known:]
            top += self._top(block)[-num_known:]
            picked += self._picked(asked, block)[-num_known:]
        entries = [
            self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)
        ]
        fields: dict[str, Any] = {"input_token_logprobs": entries}
        if asked.top:
            fields["input_top_logprobs"] = top
        if asked.ids:
            fields["input_token_ids_logprobs"] = picked
        return fields

    def _entry(self, value: float | None, token_id: int) -> list[Any]:
        text = None if self._tokenizer is None else self._tokenizer.token_text(token_id)
        return [value, token_id, text]

    def _top(self, block: LogprobBlock) -> list[list[list[Any]]]:
        return [
            [self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
            for values, ids in zip(block.top_values, block.top_ids, strict=True)
        ]

    def _picked(self, asked: LogprobOptions, block: LogprobBlock) -> list[list[list[Any]]]:
        ids = asked.ids
        return [
            [self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
            for values in block.picked
        ]
