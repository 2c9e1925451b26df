"""What a simulated engine computes: tokens that follow from the sequence and its seed alone, and a
grammar."""

from __future__ import annotations

import zlib

import numpy as np

from setpoint.core.request import Ids

LETTERS = 12
FIRST_LETTER = ord("a")
END_OF_TEXT = 257
"""The byte tokenizer's EOS."""
SPELLED_LENGTH = 12
"""Tokens of an output under a constraint."""


def token_after(history: Ids, seed: int) -> int:
    drawn = zlib.crc32(history.astype("<i4").tobytes(), seed & 0xFFFFFFFF)
    return END_OF_TEXT if drawn % 37 == 0 else FIRST_LETTER + drawn // 37 % LETTERS


class Spelling:
    """A grammar over letters: every third token is free, the others follow from those before, and
    after SPELLED_LENGTH tokens it is over."""

    def __init__(self) -> None:
        self._accepted: list[int] = []

    def accept(self, token: int) -> None:
        assert self._mask()[token], "a token that the grammar does not allow"
        self._accepted.append(token)

    def _mask(self) -> np.ndarray:
        bits = np.zeros(320, np.uint8)
        if len(self._accepted) % 3 == 2:
            bits[FIRST_LETTER : FIRST_LETTER + LETTERS] = 1
        else:
            first = sum(self._accepted) % LETTERS
            count = 1 if len(self._accepted) % 3 else 2
            bits[[FIRST_LETTER + (first + each) % LETTERS for each in range(count)]] = 1
        return bits

    def fill_mask(self, words: Ids) -> None:
        packed = np.packbits(self._mask(), bitorder="little").view("<i4")
        words[:] = packed[: len(words)]

    @property
    def terminated(self) -> bool:
        return len(self._accepted) >= SPELLED_LENGTH
