"""Converts the engine's logprob blocks to the JSON formats of chat and text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from setpoint.core.logprobs import LogprobBlock
from setpoint.core.request import Request
from setpoint.frontend.text.detokenizer import Detokenizer, make_detokenizer
from setpoint.frontend.text.tokenizer import Tokenizer


class Names:
    """Makes the names of tokens in logprobs."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """as_ids: name tokens "token_id:5" instead of by their text."""
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)


def _tops(block: LogprobBlock, position: int, picked: Sequence[int]) -> Iterable[tuple[int, float]]:
    """Tokens and their logprobs at a position: the likeliest tokens, or the token itself and the
    tokens that the client has ``picked``."""
    if picked:
        own = {block.ids[position]: block.values[position]}
        return (own | dict(zip(picked, block.picked[position], strict=True))).items()
    if not block.top_values:
        return ()
    return zip(block.top_ids[position], block.top_values[position], strict=True)


def chat_logprobs(names: Names, block: LogprobBlock, picked: Sequence[int] = ()) -> dict[str, Any]:
    """``choices[].logprobs`` of /v1/chat/completions: one entry per output token."""
    content = []
    for position, (value, token_id) in enumerate(zip(block.values, block.ids, strict=True)):
        entry = _chat_entry(names, value, token_id)
        entry["top_logprobs"] = [
            _chat_entry(names, top_value, top_id)
            for top_id, top_value in _tops(block, position, picked)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(names: Names, value: float, token_id: int) -> dict[str, Any]:
    data = names.tokenizer.token_bytes(token_id)
    return {"token": names.of(token_id), "logprob": value, "bytes": list(data)}


class CompletionLogprobs:
    """``choices[].logprobs`` of /v1/completions. ``text_offset`` is where a token begins in the
    shown text. It continues through the chunks of a stream; tokens that are skipped, or are only a
    part of a character, do not advance it."""

    def __init__(
        self, names: Names, *, skip_special_tokens: bool, picked: Sequence[int] = ()
    ) -> None:
        """skip_special_tokens: applies to the outputs; an echoed prompt is always shown without
        special tokens. picked: the tokens that the client has named, if any."""
        self._names = names
        self._picked = picked
        tokenizer = names.tokenizer
        self._offset = 0
        """Offset of the next token in the text, in characters."""
        self._prompt_text = make_detokenizer(tokenizer, skip_special_tokens=True)
        self._output_text = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def of_prompt(self, request: Request, block: LogprobBlock | None) -> dict[str, Any]:
        """The logprobs of the whole prompt, for ``echo``; the first token has none."""
        ids = request.prompt().tolist()
        num_known = min(len(block.values) if block is not None else 0, len(ids) - 1)
        fields = self._empty()
        for token_id in ids[: len(ids) - num_known]:
            self._add(fields, self._prompt_text, token_id, None, None)
        if block is not None and num_known:
            self._add_block(fields, self._prompt_text, block, num_known)
        self._offset += len(self._prompt_text.flush())
        return fields

    def of_outputs(self, block: LogprobBlock) -> dict[str, Any]:
        fields = self._empty()
        self._add_block(fields, self._output_text, block, len(block.values))
        return fields

    def _empty(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _add_block(
        self, fields: dict[str, Any], shown: Detokenizer, block: LogprobBlock, count: int
    ) -> None:
        """Add the last ``count`` positions of a block."""
        for position in range(len(block.values) - count, len(block.values)):
            by_text: dict[str, float] = {}
            for top_id, top_value in _tops(block, position, self._picked):
                by_text.setdefault(
                    self._names.of(top_id), top_value
                )  # two ids may have the same text: keep the more likely
            token_id, value = block.ids[position], block.values[position]
            by_text.setdefault(self._names.of(token_id), value)  # as OpenAI has it
            self._add(fields, shown, token_id, value, by_text)

    def _add(
        self,
        fields: dict[str, Any],
        shown: Detokenizer,
        token_id: int,
        value: float | None,
        top: dict[str, float] | None,
    ) -> None:
        fields["tokens"].append(self._names.of(token_id))
        fields["token_logprobs"].append(value)
        fields["top_logprobs"].append(top)
        fields["text_offset"].append(self._offset)
        self._offset += len(shown.feed((token_id,)))


def join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate two completion blocks."""
    return {key: first[key] + second[key] for key in first}
