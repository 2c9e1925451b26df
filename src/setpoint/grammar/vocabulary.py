"""The tokenizer as llguidance needs it: every token's bytes, from ``tokenizer.json``."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from setpoint.core.errors import CheckpointError, RequestError


class Vocabulary:
    """Reads the tokenizer when it is first asked for: that takes 0.2 s for 49,000 tokens, holds the
    interpreter's lock, and most servers never need it. Safe to use from several threads."""

    def __init__(self, folder: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: the model's, which may pad the tokenizer's. eos_token_ids: what ends an
        output; may be empty."""
        self.size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._path = Path(folder) / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    @property
    def tokenizer(self) -> LLTokenizer:
        """Raises RequestError (400) if llguidance cannot use this tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def _read(self) -> LLTokenizer:
        try:
            text = _readable(self._path.read_text(encoding="utf-8"))
            ends = list(self.eos_token_ids) or None
            try:
                return LLTokenizer(text, n_vocab=self.size, eos_token=ends)
            except ValueError as error:
                if "vocab size too small" not in str(error):
                    raise
                # The tokenizer knows more ids than the model.
                return LLTokenizer(text, eos_token=ends)
        except (OSError, ValueError, CheckpointError) as error:
            raise RequestError(
                f"This model's tokenizer cannot be used for structured output: {error}"
            ) from error


def _readable(text: str) -> str:
    """The tokenizer's JSON with a decoder that llguidance knows. Metaspace is spelt out: it writes
    a space as U+2581."""
    data: dict[str, Any] = json.loads(text)
    decoder = data.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return text
    mark = {"String": decoder.get("replacement", "\u2581")}
    replace = {"type": "Replace", "pattern": mark, "content": " "}
    data["decoder"] = {
        "type": "Sequence",
        "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}],
    }
    return json.dumps(data)
