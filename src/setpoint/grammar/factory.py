"""What the factories of every grammar library have in common: a cache of compiled constraints, and
constraints that begin after the reasoning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from setpoint.core.constraint import Constraint
from setpoint.core.grammar import Grammar
from setpoint.core.request import Request
from setpoint.grammar.after import ConstrainedAfter
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.lookahead import Automaton, Lookahead

T = TypeVar("T")


class CachingFactory(ABC, Generic[T]):
    """Implements core.grammar.GrammarFactory. ``T`` is what a constraint is compiled to."""

    def __init__(
        self, cache: CompiledCache[T], *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._cache = cache
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)

    def prepare(self) -> None:
        """Do nothing, unless a library overrides this."""

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        constraint = request.sampling.constraint
        return constraint is not None and constraint in self._cache

    def __call__(self, request: Request, is_wanted: Callable[[], bool] = lambda: True) -> Grammar:
        constraint = request.sampling.constraint
        assert constraint is not None
        compiled = self._cache.get(constraint)
        if compiled is not None and self._is_lost(compiled):
            self._cache.drop(constraint)
            compiled = None
        if compiled is None:
            compiled = self._compile(constraint, is_wanted)
            self._cache.put(constraint, compiled)
        automaton = self._start(compiled, ignore_eos=request.sampling.ignore_eos)
        if after := request.options.constrain_after:
            automaton = ConstrainedAfter(automaton, after, self._eos_token_ids)
        return Lookahead(automaton, self._vocab_size)

    def _is_lost(self, compiled: T) -> bool:
        """Whether what was compiled cannot be used any more; False, unless a library overrides
        this."""
        return False

    @abstractmethod
    def _compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> T:
        """Raises RequestError (400) for a constraint that cannot be compiled."""

    @abstractmethod
    def _start(self, compiled: T, *, ignore_eos: bool) -> Automaton:
        """The automaton of one sequence. ignore_eos: where the grammar allows more tokens, it does
        not allow the end."""
