"""Token ids to text, piece by piece, without ever splitting a UTF-8 character.

Two implementations: exact bytes for byte-level tokenizers (nearly all current models), a moving
window of ids over the Rust decoder for the others. Both cost O(1) per token on average. They know
nothing of stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from setpoint.frontend.text.tokenizer import Tokenizer

REPLACEMENT = "�"

_MAX_PENDING = 8
"""Most tokens that the window decoder holds back for an incomplete character; a character has at
most four bytes."""

_MAX_CONTEXT = 32
"""Most tokens without text that the window decoder remembers."""


class Detokenizer(Protocol):
    """One sequence's decoder. ``feed`` returns the text that became final; ``flush``, at the end,
    the text that was held back."""

    def feed(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


def make_detokenizer(tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> Detokenizer:
    """A decoder for one sequence. tokenizer: None if no id has a text."""
    if tokenizer is None:
        return NoText()
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


class NoText:
    """The detokenizer of a server without a tokenizer, whose answers are only token ids."""

    def feed(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class ByteDetokenizer:
    """Joins the bytes of tokens. Contract: the pieces and the flush joined equal
    ``Tokenizer.decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(
            b"".join([token_bytes(token_id) for token_id in ids if token_id not in self._skip])
        )

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Decodes a short window of recent ids for each token and emits what is new at its end.

    ids:     … | context | pending |
    context: already emitted tokens, there because a decoder may treat the first token of a text
    specially (SentencePiece drops its leading space); pending: tokens whose text may still change,
    because it ends inside a character. Contract: for well-formed UTF-8 the pieces and the flush
    joined equal ``Tokenizer.decode`` of all ids. (With byte fallback the Rust decoder turns a
    *whole* run of byte tokens into U+FFFD if any byte of it is wrong; a stream cannot.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._feed_one(token_id) for token_id in ids if token_id not in self._skip])

    def _feed_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        fresh = self._fresh()
        # An incomplete character shows as U+FFFD: wait for the rest of it, but not for ever.
        if fresh.endswith(REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return ""
        return self._advance(fresh)

    def flush(self) -> str:
        return self._advance(self._fresh())

    def _advance(self, fresh: str) -> str:
        # Tokens that gave no text (a leading space that was dropped) do not yet end the special
        # treatment of a start.
        self._context = self._pending if fresh else (self._context + self._pending)[-_MAX_CONTEXT:]
        self._pending = []
        return fresh

    def _fresh(self) -> str:
        if not self._pending:
            return ""
        known = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
