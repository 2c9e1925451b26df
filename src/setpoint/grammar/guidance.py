"""Grammars of the llguidance library, behind ``core.grammar``."""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from setpoint.core.constraint import Constraint
from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar
from setpoint.core.plan import forbid
from setpoint.core.request import Ids, Request
from setpoint.grammar.after import ConstrainedAfter
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.definition import definition, not_compiled
from setpoint.grammar.vocabulary import Vocabulary

LIMITS: dict[str, int] = {
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Less than llguidance's own limits: the work of one mask stays below some 100 ms, and the states
that a sequence keeps below some 100 MB."""

MASK_CREDIT_S = 0.25
MASK_SHARE_S = 0.003
"""Seconds of computing that a sequence's masks may take: the first, and the second for each token
in addition. The masks of a usual schema take a tenth of the second."""


class GuidanceGrammar:
    """One sequence's automaton. Once it is made, only the loop calls it."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary, *, ignore_eos: bool) -> None:
        """ignore_eos: where the grammar allows more tokens, it does not allow the end."""
        tokenizer = vocabulary.tokenizer
        self._matcher = matcher
        # A model without an end token has one for llguidance, which must not be sampled.
        self._forbidden = tokenizer.eos_tokens if ignore_eos or not vocabulary.eos_token_ids else ()
        self._credit_s = MASK_CREDIT_S
        words = -(-tokenizer.vocab_size // 32)
        self._own = np.zeros(words, np.int32) if words != -(-vocabulary.size // 32) else None
        """Room for a mask of more tokens than the model has."""

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            if why(self._matcher) == TOO_MUCH_WORK:
                raise RequestError(f"The grammar cannot be applied any further: {TOO_MUCH_WORK}.")
            raise RequestError(f"The grammar does not allow token {token}.")

    def fill_mask(self, words: Ids) -> None:
        target = words if self._own is None else self._own
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self._credit_s += MASK_SHARE_S - (time.thread_time() - began)
        if self._credit_s < 0:
            raise RequestError(f"The grammar cannot be applied any further: {TOO_MUCH_WORK}.")
        if self._matcher.is_error():
            raise RequestError(f"The grammar cannot be applied any further: {why(self._matcher)}.")
        if self._own is not None:
            words[:] = self._own[: len(words)]
        if self._forbidden:
            ends = words.copy()
            forbid(words, self._forbidden)
            if not words.any():
                words[:] = ends

    @property
    def terminated(self) -> bool:
        return self._matcher.is_stopped()


TOO_MUCH_WORK = "it takes too much work to find the tokens that it allows"


def why(matcher: LLMatcher) -> str:
    """Why a matcher that worked has stopped with an error."""
    reason, *_ = matcher.get_error().split("\n")
    if (
        matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex")
        or reason == "lexer error: too many expressions constructed"
    ):
        return TOO_MUCH_WORK
    return "it can match nothing" if reason.startswith("NoExtension") else reason


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

    def __call__(self, request: Request) -> Grammar:
        constraint = request.sampling.constraint
        assert constraint is not None
        matcher = self._compiled.get(constraint)
        if matcher is None:
            matcher = self._compile(constraint)
            self._compiled.put(constraint, matcher)
        vocabulary = self._vocabulary
        grammar = GuidanceGrammar(
            matcher.deep_copy(), vocabulary, ignore_eos=request.sampling.ignore_eos
        )
        if not request.constrain_after:
            return grammar
        return ConstrainedAfter(grammar, request.constrain_after, vocabulary.eos_token_ids)

    def _compile(self, constraint: Constraint) -> LLMatcher:
        vocabulary = self._vocabulary
        matcher = LLMatcher(
            vocabulary.tokenizer,
            definition(constraint, vocabulary.special_tokens),
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
