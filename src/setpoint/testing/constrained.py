"""Outputs of a grammar without a model: tokens drawn at random from what its masks allow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from setpoint.core.grammar import Grammar

MAX_TOKENS = 3000
PATIENCE = 60
"""Number of tokens after which a draw tries to come to an end."""
CLOSING = frozenset('"]},')


@dataclass(slots=True)
class Output:
    ids: list[int] = field(default_factory=list)
    is_whole: bool = False
    """Whether the grammar ended it, or let it end."""
    mask_s: list[float] = field(default_factory=list)
    """Seconds that each mask took."""


def allowed_tokens(grammar: Grammar, vocab_size: int) -> list[int]:
    """The tokens that the grammar allows next, in order."""
    words = np.zeros(-(-vocab_size // 32), np.int32)
    grammar.fill_mask(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def random_output(
    grammar: Grammar,
    draw: random.Random,
    *,
    vocab_size: int,
    ends: Collection[int],
    closers: Collection[int],
) -> Output:
    """Draw tokens until the output ends. ends: the tokens that end an output. closers: tokens that
    bring an end nearer, which a long output prefers."""
    output = Output()
    while len(output.ids) < MAX_TOKENS:
        began = time.perf_counter()
        allowed = allowed_tokens(grammar, vocab_size)
        output.mask_s.append(time.perf_counter() - began)
        assert allowed, "a mask without a token"
        is_long = len(output.ids) > PATIENCE
        if not set(ends).isdisjoint(allowed):
            if is_long or len(allowed) == len(ends) or draw.random() < 0.3:
                output.is_whole = True
                return output
            allowed = [token for token in allowed if token not in ends]
        if draw.random() < (0.9 if is_long else 0.2):
            allowed = [token for token in allowed if token in closers] or allowed
        token = draw.choice(allowed)
        grammar.accept(token)
        output.ids.append(token)
        if grammar.terminated:
            output.is_whole = True
            return output
    return output


def closing_tokens(texts: Iterable[tuple[int, Callable[[], str]]]) -> frozenset[int]:
    """The tokens whose text is one closing character: a quote, a bracket, a brace, or a comma."""
    return frozenset(token for token, text in texts if text() in CLOSING)
