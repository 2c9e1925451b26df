"""Implements ``core.grammar`` with the xgrammar library. Imports neither the library nor torch:
only the processes that run it do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from setpoint.core.constraint import Constraint
from setpoint.grammar.cache import CompiledCache
from setpoint.grammar.factory import CachingFactory
from setpoint.grammar.lookahead import Automaton
from setpoint.grammar.patience import Patience
from setpoint.grammar.processes import MAX_PROCESSES, GrammarProcess, Nursery
from setpoint.grammar.remote import RemoteAutomaton
from setpoint.grammar.schema import JsonSpacing

MAX_CACHED_BYTES = 512 << 20
"""Most bytes of all cached grammars together. The grammar of a usual schema takes 8 MB for a
vocabulary of 49,000 tokens."""
MAX_CACHED = MAX_PROCESSES // 2
"""Most cached grammars: each has a process."""


class XgrammarFactory(CachingFactory[GrammarProcess]):
    """A compiled constraint is the process that compiled it."""

    def __init__(
        self,
        folder: str | Path,
        spacing: JsonSpacing,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """The other arguments are those of ``grammar.vocabulary.Vocabulary``, which the processes
        make."""
        cache: CompiledCache[GrammarProcess] = CompiledCache(
            lambda _, process: process.num_bytes,
            max_size=MAX_CACHED_BYTES,
            max_entries=MAX_CACHED,
        )
        super().__init__(cache, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        worker = (sys.executable, "-m", "setpoint.engine.grammar.xgrammar_worker")
        most = 0 if spacing.has_none else spacing.max_chars
        numbers = (vocab_size, most, *eos_token_ids)
        self._nursery = Nursery((*worker, str(folder), *map(str, numbers)))
        self._patience = Patience()

    def _compile(self, constraint: Constraint, is_wanted: Callable[[], bool]) -> GrammarProcess:
        while self._nursery.is_full and self._cache.drop_oldest():
            pass
        return self._nursery.compiled(constraint, is_wanted)

    def _is_lost(self, compiled: GrammarProcess) -> bool:
        return compiled.is_lost

    def _start(self, compiled: GrammarProcess, *, ignore_eos: bool) -> Automaton:
        forbidden = self._eos_token_ids if ignore_eos else ()
        return RemoteAutomaton(compiled, self._patience, forbidden=forbidden)
