"""Grammars of the llguidance library, behind ``core.grammar``."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.request import Ids, Request
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.definition import definition, not_compiled
from setpoint.grammar.vocabulary import Vocabulary


class GuidanceGrammar:
    """One sequence's automaton. Called by the loop only, once it is made."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        words = -(-vocabulary.tokenizer.vocab_size // 32)
        self._own = np.zeros(words, np.int32) if words != -(-vocabulary.size // 32) else None
        """Room for a mask of more tokens than the model has."""

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise RequestError(
                f"The grammar does not allow token {token}: {self._matcher.get_error()}"
            )

    def fill_mask(self, words: Ids) -> None:
        target = words if self._own is None else self._own
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._own is not None:
            words[:] = self._own[: len(words)]
        if self._matcher.is_error():
            raise RequestError(f"The grammar allows no next token: {self._matcher.get_error()}")

    @property
    def terminated(self) -> bool:
        return bool(self._matcher.is_stopped())


class GuidanceFactory:
    """Implements core.grammar.GrammarFactory."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: CompiledCache[LLMatcher] = CompiledCache()

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        constraint = request.sampling.constraint
        return constraint is not None and constraint in self._compiled

    def __call__(self, request: Request) -> GuidanceGrammar:
        constraint = request.sampling.constraint
        assert constraint is not None
        matcher = self._compiled.get(constraint)
        if matcher is None:
            matcher = self._compile(constraint)
            self._compiled.put(constraint, matcher)
        return GuidanceGrammar(matcher.deep_copy(), self._vocabulary)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(
            self._vocabulary.tokenizer, definition(constraint), log_level=0, limits=limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that can match nothing fails here
        if matcher.is_error():
            raise not_compiled(constraint, matcher.get_error())
        return matcher
