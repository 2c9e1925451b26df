"""Grammars of the llguidance library, behind ``core.grammar``."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.request import Ids
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.constraint_refusal import not_compiled
from setpoint.grammar.definition import definition
from setpoint.grammar.factory import CachingFactory
from setpoint.grammar.lookahead import Automaton
from setpoint.grammar.masks import (
    NOTHING_ALLOWED,
    TOO_MUCH_WORK,
    MaskBudget,
    forbid_while_others,
    stuck,
)
from setpoint.grammar.paced import Paced
from setpoint.grammar.patience import Patience
from setpoint.grammar.schema import JsonSpacing
from setpoint.grammar.vocabulary import Vocabulary

LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Less than llguidance's own limits: the work of one mask stays below some 100 ms, and the states
that a sequence keeps below some 100 MB."""

MAX_CACHED_CHARS = 8 << 20
"""Most characters of all cached texts together; what is compiled takes a multiple of that."""


class GuidanceGrammar:
    """Implements Matcher."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, ignore_eos: bool) -> None:
        """ignore_eos: where the grammar allows more tokens, it does not allow the end."""
        tokenizer = vocabulary.tokenizer
        self._matcher = matcher
        # A model without an end token has one for llguidance, which must not be sampled.
        self._forbidden = tokenizer.eos_tokens if ignore_eos or not vocabulary.eos_token_ids else ()
        self._budget = MaskBudget()
        words = -(-tokenizer.vocab_size // 32)
        self._own = np.zeros(words, np.int32) if words != -(-vocabulary.size // 32) else None
        """Room for a mask of more tokens than the model has."""

    def accept(self, token: int) -> None:
        began = time.thread_time()
        is_accepted = self._matcher.consume_token(token)
        self._budget.earn()
        self._budget.spend(time.thread_time() - began)
        if not is_accepted:
            if why(self._matcher) == TOO_MUCH_WORK:
                raise stuck(TOO_MUCH_WORK)
            raise RequestError(f"The grammar does not allow token {token}.")

    def fill_mask(self, words: Ids) -> None:
        target = words if self._own is None else self._own
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self._budget.spend(time.thread_time() - began)
        if self._matcher.is_error():
            raise stuck(why(self._matcher))
        if self._own is not None:
            words[:] = self._own[: len(words)]
        if self._forbidden:
            forbid_while_others(words, self._forbidden)

    @property
    def terminated(self) -> bool:
        return self._matcher.is_stopped()


def why(matcher: LLMatcher) -> str:
    """Why a matcher that worked has stopped with an error."""
    reason, *_ = matcher.get_error().split("\n")
    if (
        matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex")
        or reason == "lexer error: too many expressions constructed"
    ):
        return TOO_MUCH_WORK
    return NOTHING_ALLOWED if reason.startswith("NoExtension") else reason


class GuidanceFactory(CachingFactory[LLMatcher]):
    """Grammars of llguidance."""

    def __init__(self, vocabulary: Vocabulary, spacing: JsonSpacing) -> None:
        super().__init__(
            CompiledCache(lambda constraint, _: len(constraint.text), max_size=MAX_CACHED_CHARS),
            vocab_size=vocabulary.size,
            eos_token_ids=vocabulary.eos_token_ids,
        )
        self._vocabulary, self._spacing = vocabulary, spacing
        self._patience = Patience()

    def prepare(self) -> None:
        with suppress(RequestError):  # which every request for a grammar will get
            _ = self._vocabulary.tokenizer

    def _compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> LLMatcher:
        vocabulary = self._vocabulary
        matcher = LLMatcher(
            vocabulary.tokenizer,
            definition(constraint, vocabulary.special_tokens, self._spacing),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False, **LIMITS),
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that can match nothing fails here
            if matcher.is_error():
                raise not_compiled(constraint, why(matcher))
        if matcher.is_error():
            raise not_compiled(constraint, matcher.get_error())
        return matcher

    def _start(self, compiled: LLMatcher, *, ignore_eos: bool) -> Automaton:
        vocabulary = self._vocabulary
        matcher = GuidanceGrammar(compiled.deep_copy(), vocabulary, ignore_eos=ignore_eos)
        return Paced(matcher, self._patience, vocab_size=vocabulary.size)
