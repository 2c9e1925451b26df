"""The tokenizer as llguidance needs it: every token's bytes, from ``tokenizer.json``."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from setpoint.core.errors import RequestError


class Vocabulary:
    """Reads the tokenizer when it is first asked for: that takes 0.3 s for 49,000 tokens, 1 s for
    128,000, and holds the interpreter's lock. Safe to use from several threads."""

    def __init__(self, folder: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: the model's, which may pad the tokenizer's. eos_token_ids: what ends an
        output; may be empty."""
        self.size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._path = Path(folder) / "tokenizer.json"
        self._lock = threading.Lock()
        self._read: tuple[LLTokenizer, dict[str, int]] | None = None

    @property
    def tokenizer(self) -> LLTokenizer:
        """Raises RequestError (400) if llguidance cannot use this tokenizer."""
        return self._both()[0]

    @property
    def token_bytes(self) -> list[bytes]:
        """What each of the model's tokens adds to the output; nothing if it has no text. A special
        token has its name. Raises RequestError (400) like ``tokenizer``."""
        tokenizer = self.tokenizer
        known = min(self.size, tokenizer.vocab_size)
        found = [tokenizer.decode_bytes([token]) for token in range(known)]
        return found + [b""] * (self.size - known)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the tokens that no text is encoded to unless it spells them, by name."""
        return self._both()[1]

    def _both(self) -> tuple[LLTokenizer, dict[str, int]]:
        with self._lock:
            if self._read is None:
                try:
                    data = json.loads(self._path.read_text(encoding="utf-8"))
                    self._read = self._tokenizer_of(_readable(data)), _special_tokens(data)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    raise RequestError(
                        f"This model's tokenizer cannot be used for structured output: {error}"
                    ) from error
            return self._read

    def _tokenizer_of(self, data: dict[str, Any]) -> LLTokenizer:
        text, ends = json.dumps(data), list(self.eos_token_ids) or None
        try:
            tokenizer = LLTokenizer(text, n_vocab=self.size, eos_token=ends, slices=[])
        except ValueError as error:
            if "vocab size too small" not in str(error):
                raise
            # the tokenizer knows more ids than the model
            tokenizer = LLTokenizer(text, eos_token=ends, slices=[])
        # Each of the two calls holds the interpreter's lock: streams get a step between them.
        return tokenizer.with_slices(LLTokenizer.general_slices())


def _special_tokens(data: dict[str, Any]) -> dict[str, int]:
    return {
        token["content"]: token["id"]
        for token in data.get("added_tokens") or []
        if token.get("special")
    }


def _readable(data: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json with a decoder that llguidance knows. Metaspace, which writes
    a space as U+2581, is spelt out."""
    decoder = data.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return data
    mark = {"String": decoder.get("replacement", "\u2581")}
    replace = {"type": "Replace", "pattern": mark, "content": " "}
    steps = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return {**data, "decoder": {"type": "Sequence", "decoders": steps}}
