"""Which grammar engine the engine process uses (``--grammar-backend``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from setpoint.core.errors import RequestError
from setpoint.core.grammar import Grammar, GrammarFactory
from setpoint.core.messages import Prepared
from setpoint.core.request import Request
from setpoint.launch.grammar_threads import GrammarThreads
from setpoint.launch.job import EngineJob

if TYPE_CHECKING:
    from setpoint.grammar.vocabulary import Vocabulary


class LazyFactory:
    """Implements GrammarFactory with one that is made when the first grammar is: to import the
    library and to read the tokenizer take 0.3 s, and most servers never need them."""

    def __init__(self, make: Callable[[], GrammarFactory]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._factory: GrammarFactory | None = None

    def constrains(self, request: Request) -> bool:
        return request.sampling.constraint is not None

    def is_cached(self, request: Request) -> bool:
        return self._factory is not None and self._factory.is_cached(request)

    def __call__(self, request: Request) -> Grammar:
        with self._lock:
            if self._factory is None:
                self._factory = self._make()
        return self._factory(request)


def grammar_threads(job: EngineJob, post: Callable[[Prepared], None]) -> GrammarThreads:
    """The preparer of an engine. ``post`` puts a message into the loop's inbox."""
    return GrammarThreads(LazyFactory(lambda: _factory(job)), post)


def _factory(job: EngineJob) -> GrammarFactory:
    """Raises RequestError if there is none."""
    backend = job.config.options.grammar_backend
    if backend == "none":
        raise RequestError(
            "This server was started with --grammar-backend none, so it cannot constrain outputs"
            " (json_schema, regex, ebnf, structural_tag)."
        )
    from setpoint.grammar.vocabulary import Vocabulary  # imported here as LazyFactory says

    spec = job.spec
    vocabulary = Vocabulary(
        job.tokenizer_folder, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids
    )
    return grammar_factory(backend, vocabulary)


def grammar_factory(backend: str, vocabulary: Vocabulary) -> GrammarFactory:
    """The factory of a library, which is imported here for the reason that LazyFactory gives;
    xgrammar imports torch and transformers as well."""
    if backend == "xgrammar":
        from setpoint.engine.grammar.xgrammar_factory import XgrammarFactory

        factory: GrammarFactory = XgrammarFactory(vocabulary)
        return factory
    from setpoint.grammar.guidance import GuidanceFactory

    return GuidanceFactory(vocabulary)
