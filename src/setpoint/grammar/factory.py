"""What the factories of every grammar library have in common: a cache of compiled constraints, and
constraints that begin behind the reasoning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from setpoint.core.constraint import Constraint
from setpoint.core.grammar import Grammar
from setpoint.core.request import Request
from setpoint.grammar.after import ConstrainedAfter
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.lookahead import Automaton, Lookahead
from setpoint.grammar.vocabulary import Vocabulary

T = TypeVar("T")


class CachingFactory(ABC, Generic[T]):
    """Implements core.grammar.GrammarFactory. ``T`` is what a constraint is compiled to."""

    def __init__(self, vocabulary: Vocabulary, cache: CompiledCache[T]) -> None:
        self._vocabulary = vocabulary
        self._cache = cache

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        constraint = request.sampling.constraint
        return constraint is not None and constraint in self._cache

    def __call__(self, request: Request) -> Grammar:
        constraint = request.sampling.constraint
        assert constraint is not None
        compiled = self._cache.get(constraint)
        if compiled is None:
            compiled = self._compile(constraint)
            self._cache.put(constraint, compiled)
        vocabulary = self._vocabulary
        automaton = self._start(compiled, ignore_eos=request.sampling.ignore_eos)
        if request.constrain_after:
            automaton = ConstrainedAfter(
                automaton, request.constrain_after, vocabulary.eos_token_ids
            )
        return Lookahead(automaton, vocabulary.size)

    @abstractmethod
    def _compile(self, constraint: Constraint) -> T:
        """Raises RequestError (400) for a constraint that cannot be compiled."""

    @abstractmethod
    def _start(self, compiled: T, *, ignore_eos: bool) -> Automaton:
        """The automaton of one sequence. ignore_eos: where the grammar allows more tokens, it does
        not allow the end."""
