"""Converts the engine's logprob blocks to the JSON shape of ``/generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from setpoint.core.messages import LogprobBlock
from setpoint.core.request import Request
from setpoint.frontend.text.tokenizer import Tokenizer


class NativeLogprobs:
    """Makes ``[logprob, token_id, text | null]`` per position, and lists of those for top and
    picked tokens (docs/sglang/api.md#generate-answer)."""

    def __init__(self, tokenizer: Tokenizer, *, with_text: bool) -> None:
        self._tokenizer = tokenizer
        self._with_text = with_text

    def of_outputs(self, request: Request, blocks: Sequence[LogprobBlock]) -> dict[str, Any]:
        values = [
            self._entry(value, token_id)
            for block in blocks
            for value, token_id in zip(block.values, block.ids, strict=True)
        ]
        fields: dict[str, Any] = {
            "output_token_logprobs": values,
            "output_token_logprobs_length": len(values),
        }
        if request.top_logprobs_num:
            fields["output_top_logprobs"] = [
                position for block in blocks for position in self._top(block)
            ]
        if request.token_ids_logprob:
            fields["output_token_ids_logprobs"] = [
                position for block in blocks for position in self._picked(request, block)
            ]
        return fields

    def of_prompt(self, request: Request, block: LogprobBlock | None) -> dict[str, Any]:
        """The prompt's positions from ``logprob_start_len`` to the end; none if that is -1. The
        first entry has no logprob, because nothing reported precedes it."""
        start = request.logprob_start_len
        ids = request.prompt()[start:].tolist() if start >= 0 else []
        num_known = min(len(block.values) if block is not None else 0, max(len(ids) - 1, 0))
        num_unknown = len(ids) - num_known
        unknown: list[Any] = [None] * num_unknown
        values: list[float | None] = list(unknown)
        top, picked = list(unknown), list(unknown)
        if block is not None and num_known:
            values += block.values[-num_known:]
            top += self._top(block)[-num_known:]
            picked += self._picked(request, block)[-num_known:]
        entries = [
            self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)
        ]
        fields: dict[str, Any] = {"input_token_logprobs": entries}
        if request.top_logprobs_num:
            fields["input_top_logprobs"] = top
        if request.token_ids_logprob:
            fields["input_token_ids_logprobs"] = picked
        return fields

    def _entry(self, value: float | None, token_id: int) -> list[Any]:
        return [value, token_id, self._tokenizer.token_text(token_id) if self._with_text else None]

    def _top(self, block: LogprobBlock) -> list[list[list[Any]]]:
        return [
            [self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
            for values, ids in zip(block.top_values, block.top_ids, strict=True)
        ]

    def _picked(self, request: Request, block: LogprobBlock) -> list[list[list[Any]]]:
        ids = request.token_ids_logprob
        return [
            [self._entry(value, token_id) for value, token_id in zip(values, ids, strict=True)]
            for values in block.picked
        ]
