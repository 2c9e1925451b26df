"""A tokenizer.json through the Rust ``tokenizers`` library: text to ids, ids to text, and the bytes
of a single token.

Works on strings and int32 ids. It knows nothing of chat templates, requests or streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders

from setpoint.core.errors import CheckpointError
from setpoint.core.jsonfile import read_object
from setpoint.core.request import Ids


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's reversible map, as character -> byte: printable bytes map from themselves, the others
    from U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(256 + index), byte) for index, byte in enumerate(rest))
    return alphabet


BYTE_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """Encodes and decodes; immutable after construction and safe to use from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens or {}
        """Named special tokens ("bos_token", "eos_token", …) as the checkpoint spells them; for
        chat templates."""
        self.config = config or {}
        """``tokenizer_config.json``, for clients that ask for it."""
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        """Id -> text of the tokens that are found in a text before all others, special or not: no
        other tokens are made of their text."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(self.added_tokens[token_id] for token_id in self.special_ids)
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        bos = self.special_tokens.get("bos_token")
        self.bos_id: int | None = None if bos is None else tokenizer.token_to_id(bos)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, and the special tokens of ``tokenizer_config.json`` and
        ``special_tokens_map.json``. Raises CheckpointError."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"No tokenizer.json in {folder}; pass --tokenizer-path with a folder that has one."
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except (
            Exception
        ) as error:  # the Rust library raises plain Exception for every kind of malformed file
            raise CheckpointError(
                f"{path} cannot be read as a tokenizer ({error}); fetch it again, or pass"
                " --tokenizer-path."
            ) from error
        # Older checkpoints name them in a file of their own, newer ones may do so twice.
        named = _named_special_tokens(_object(folder, "special_tokens_map.json"))
        config = read_tokenizer_config(folder)
        named |= _named_special_tokens(config)
        return cls(tokenizer, special_tokens=named, config=config)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows, added tokens included. The model's own vocabulary
        may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token: n characters of text are at least n / max_token_chars
        tokens."""
        return max(
            (len(token) for token in self._tokenizer.get_vocab(with_added_tokens=True)), default=1
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Ids:
        # The batch call releases the GIL and computes no character offsets, the single call does
        # neither.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
            0
        ]
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; ids that the tokenizer does not know add no text."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token contributes to the text. Exact for byte-level tokenizers;
        otherwise the UTF-8 of the token decoded alone."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as a printable string (for logprobs): part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _compute_token_bytes(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        values = [BYTE_ALPHABET.get(char) for char in token]
        # A token with a character outside the alphabet (an added token) stands for itself, as the
        # Rust decoder has it.
        return (
            token.encode()
            if None in values
            else bytes(value for value in values if value is not None)
        )


def read_tokenizer_config(folder: str | Path) -> dict[str, Any]:
    """``tokenizer_config.json`` of a checkpoint, {} where there is none. Raises CheckpointError if
    it is not a JSON object."""
    return _object(folder, "tokenizer_config.json")


def _object(folder: str | Path, name: str) -> dict[str, Any]:
    path = Path(folder) / name
    return read_object(path) if path.exists() else {}


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named
